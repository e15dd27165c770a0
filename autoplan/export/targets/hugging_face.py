"""transformers: keyword arguments of ``DistributedConfig``, for ``from_pretrained(..., distributed_config=...)``.

Names read in transformers/distributed/configuration_utils.py of 5.24, whose class checks them in the tests.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings, flattened
from autoplan.export.targets.types import Exported, Imported, Losses, Target, header, recompute_of, torchrun
from autoplan.plan import Plan

_WHERE = "the transformers configuration"


def export(plan: Plan) -> Exported:
    """``distributed_config.json``, and ``load.py`` that makes a model with it."""
    strategy, losses = plan.strategy, Losses("transformers")
    losses.refuse(strategy.context > 1, f"context {strategy.context}", "plan with --strategy context=1")
    ranks = strategy.data * strategy.tensor
    losses.refuse(
        strategy.expert > 1 and (strategy.expert % strategy.tensor > 0 or ranks % strategy.expert > 0),
        f"expert {strategy.expert} beside tensor {strategy.tensor} and data {strategy.data}",
        "an expert degree that is a multiple of tensor and divides data x tensor",
    )
    policy, everywhere = recompute_of(plan)
    sharded = strategy.zero_stage > 0
    losses.note(0 < strategy.zero_stage < 3, f"ZeRO-{strategy.zero_stage}: FSDP shards parameters too")
    losses.note(strategy.sequence_parallel, "sequence parallelism: it is not wired up in transformers yet")
    losses.note(
        not everywhere or policy == "selective", "recompute layer by layer or of the attention core: all layers"
    )
    losses.note(
        strategy.pipeline > 1, "the stages' boundaries and the schedule: transformers places its own pipeline stages"
    )
    config = {
        "tp_size": strategy.tensor,
        "fsdp_size": strategy.data if sharded else 1,
        "dp_replicate_size": 1 if sharded else strategy.data,
        "pp_size": strategy.pipeline,
        "ep_size": strategy.expert,
    }
    comments = "\n".join(header(plan))
    lines = [
        f'"""{comments}"""',
        "",
        "import json",
        "from pathlib import Path",
        "",
        "from transformers import AutoModelForCausalLM",
        "from transformers.distributed import DistributedConfig",
        "",
        "",
        "def load(name: str):",
        '    """The model, sharded by the plan. Run under torchrun."""',
        '    settings = json.loads(Path(__file__).with_name("distributed_config.json").read_text())',
        "    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(**settings))",
        *(["    model.gradient_checkpointing_enable()"] if policy != "none" else []),
        *(["    model.compile()"] if plan.compiled else []),
        "    return model",
        "",
    ]
    return Exported(
        files={"distributed_config.json": json.dumps(config, indent=2) + "\n", "load.py": "\n".join(lines)},
        launch=torchrun(plan, f"train.py  # per_device_train_batch_size={strategy.micro_batch_size}"),
        lost=tuple(losses.notes),
    )


def read(text: str) -> Imported:
    """The strategy of a ``distributed_config.json``. Raises PlanFileError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"not JSON: {error}", where=_WHERE) from None
    if not isinstance(config, dict):
        raise PlanFileError("not an object", where=_WHERE, legal='{"tp_size": 2, "fsdp_size": 4, ...}')
    settings = Settings(dict(flattened(config)), _WHERE)

    def size(name: str) -> int:
        value = settings.get(name)
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanFileError(f"{name} is {value!r}", where=_WHERE, legal="a number from 1")
        return value

    strategy: dict[str, Any] = {
        "data": size("fsdp_size") * size("dp_replicate_size"),
        "tensor": size("tp_size"),
        "pipeline": size("pp_size"),
        "expert": size("ep_size"),
        "context": 1,
        "zero_stage": 3 if size("fsdp_size") > 1 else 0,
    }
    gpus = strategy["data"] * strategy["tensor"] * strategy["pipeline"]
    return Imported(strategy=strategy, gpus=gpus, notes=settings.not_priced())


TARGET = Target(name="transformers", releases=("5.24",), export=export, read=read)

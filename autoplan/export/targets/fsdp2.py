"""FSDP2: a function that shards a model with torch's own ``fully_shard`` (or replicates it), over a device mesh."""

from __future__ import annotations

import ast
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings
from autoplan.export.targets.types import Exported, Imported, Losses, Target, header, recompute_of, torchrun
from autoplan.plan import Plan

_WHERE = "the FSDP2 module"
_CONSTANTS = ("DATA", "ZERO_STAGE", "MICRO_BATCH_SIZE", "MICRO_BATCHES", "RECOMPUTE", "PRECISION")


def export(plan: Plan) -> Exported:
    """``parallelize.py``: ``parallelize(model)`` for a model whose repeated blocks stand in a ModuleList."""
    strategy, losses = plan.strategy, Losses("FSDP2")
    for axis in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(strategy, axis)
        losses.refuse(degree > 1, f"{axis} {degree}", f"plan with --strategy {axis}=1, or --to torchtitan")
    policy, everywhere = recompute_of(plan)
    losses.note(strategy.zero_stage == 1, "ZeRO-1: fully_shard scatters gradients every micro-batch too")
    losses.note(
        policy == "selective" or not everywhere,
        "recompute layer by layer or of the attention core: whole layers, all of them",
    )
    comments = "\n".join(header(plan))
    text = f'''"""{comments}"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

DATA = {strategy.data}
ZERO_STAGE = {strategy.zero_stage}
MICRO_BATCH_SIZE = {strategy.micro_batch_size}
MICRO_BATCHES = {strategy.micro_batches}
RECOMPUTE = {policy != "none"}
PRECISION = "{plan.precision}"
COMPILED = {plan.compiled}


def blocks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(owner, name) of the repeated blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return [(each, name) for each in lists for name, _ in each.named_children()]


def parallelize(model: nn.Module, device: str = "cuda") -> nn.Module:
    """The model over DATA ranks; call it under torchrun."""
    mesh = init_device_mesh(device, (DATA,), mesh_dim_names=("data",))
    if RECOMPUTE:
        for owner, name in blocks(model):
            setattr(owner, name, checkpoint_wrapper(getattr(owner, name)))
    if COMPILED:
        for owner, name in blocks(model):
            getattr(owner, name).compile()
    if not ZERO_STAGE:
        return DistributedDataParallel(model, device_mesh=mesh)
    dtype = {{"bf16": torch.bfloat16, "fp16": torch.float16}}.get(PRECISION)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for owner, name in blocks(model):
        fully_shard(getattr(owner, name), mesh=mesh, mp_policy=policy, reshard_after_forward=ZERO_STAGE == 3)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=ZERO_STAGE == 3)
'''
    return Exported(files={"parallelize.py": text}, launch=torchrun(plan, "train.py"), lost=tuple(losses.notes))


def read(text: str) -> Imported:
    """The strategy of the constants of a ``parallelize.py`` that this wrote. Raises PlanFileError."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanFileError(f"not Python: {error.msg}", where=f"{_WHERE}, line {error.lineno}") from None
    found: dict[str, Any] = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found[node.targets[0].id] = node.value.value
    missing = [name for name in _CONSTANTS if name not in found]
    if missing:
        raise PlanFileError(
            f"{missing[0]} is not set here",
            where=_WHERE,
            legal="a parallelize.py that `autoplan export --to fsdp2` wrote",
        )
    settings = Settings(found, _WHERE)
    for name in _CONSTANTS:
        settings.get(name)
    compiled = settings.get("COMPILED") is True  # earlier files have none
    strategy = {
        "data": found["DATA"],
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "expert": 1,
        "zero_stage": found["ZERO_STAGE"],
        "micro_batch_size": found["MICRO_BATCH_SIZE"],
        "recompute": "full" if found["RECOMPUTE"] else "none",
    }
    batch = found["DATA"] * found["MICRO_BATCH_SIZE"] * found["MICRO_BATCHES"]
    return Imported(
        strategy=strategy,
        gpus=found["DATA"],
        global_batch=batch,
        precision=found["PRECISION"],
        compiled=compiled,
        notes=settings.not_priced(),
    )


TARGET = Target(name="fsdp2", releases=("torch 2.13",), export=export, read=read)

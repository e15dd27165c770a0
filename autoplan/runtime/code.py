"""A rank's program as readable Python, for people: with shapes and the user's lines; it is not executed."""

from __future__ import annotations

from autoplan.passes.split_stages import Value
from autoplan.plan import Strategy
from autoplan.runtime.build import RankGraphs
from autoplan.schedules import stage_actions
from autoplan.sharding.placements import Shard


def stage_code(graphs: RankGraphs, strategy: Strategy, rank: int) -> str:
    """Header (coordinates, schedule, values sent and received, split parameters) and the stage's forward."""
    at = strategy.coordinates(rank)
    stage = graphs.stages[at.pipeline]
    actions = stage_actions(
        strategy.schedule, stage=at.pipeline, stages=strategy.pipeline, micro_batches=strategy.micro_batches
    )
    split = [name for name in stage.parameters if isinstance(graphs.placements.get(name), Shard)]
    lines = [
        f"Rank {rank} of {strategy.gpus}: stage {at.pipeline}, data rank {at.data}, tensor rank {at.tensor} "
        f"({strategy.describe()}).",
        f"Schedule {strategy.schedule}: {' '.join(map(str, actions))}",
        *(f"receives {_in_words(value)} from stage {value.source}" for value in stage.receives),
        *(f"sends {_in_words(value)} to stage {', '.join(map(str, value.destinations))}" for value in stage.sends),
        *(f"holds a shard of {name}: {graphs.placements[name]}" for name in split),
        *(f"sums the gradient of {name} with the other stages that hold it" for name in stage.shared_parameters),
    ]
    body = stage.graph_module.print_readable(print_output=False, include_stride=False, include_device=False)
    return "".join(f"# {line}\n" for line in lines) + "\n" + body.strip() + "\n"


def _in_words(value: Value) -> str:
    sizes = ", ".join(_size(per_sample, constant) for per_sample, constant in value.sizes)
    return f"{value.name} [{sizes}] {str(value.dtype).removeprefix('torch.')}"


def _size(per_sample: int, constant: int) -> str:
    if not per_sample:
        return str(constant)
    product = "batch" if per_sample == 1 else f"{per_sample}*batch"
    return f"{product}+{constant}" if constant else product

"""A rank's program as readable Python, for people: with shapes and the user's lines; it is not executed."""

from __future__ import annotations

from autoplan.passes.split_stages import Value
from autoplan.plan import Strategy
from autoplan.runtime.build import RankGraphs
from autoplan.schedules import rank_actions, stages_of_rank
from autoplan.sharding.placements import Shard


def stage_code(graphs: RankGraphs, strategy: Strategy, rank: int) -> str:
    """Header (coordinates, schedule) and for each of the rank's stages the values sent and received, the split
    parameters and the forward."""
    at = strategy.coordinates(rank)
    counts = {"stages": len(graphs.stages), "virtual_stages": strategy.virtual_stages}
    own = stages_of_rank(at.pipeline, **counts)
    actions = rank_actions(strategy.schedule, rank=at.pipeline, micro_batches=strategy.micro_batches, **counts)
    header = [
        f"Rank {rank} of {strategy.gpus}: stage {', '.join(map(str, own))}, data rank {at.data}, "
        f"tensor rank {at.tensor} ({strategy.describe()}).",
        f"Schedule {strategy.schedule}: {' '.join(map(str, actions))}",
    ]
    if len(own) == 1:
        return _commented(header + _facts(graphs, own[0])) + _body(graphs, own[0])
    each = [_commented([f"Stage {s}", *_facts(graphs, s)]) + _body(graphs, s) for s in own]
    return _commented(header) + "\n" + "\n\n".join(each)


def _facts(graphs: RankGraphs, index: int) -> list[str]:
    """Values received and sent, split and shared parameters of a stage."""
    stage = graphs.stages[index]
    split = [name for name in stage.parameters if isinstance(graphs.placements.get(name), Shard)]
    return [
        *(f"receives {_in_words(value)} from stage {value.source}" for value in stage.receives),
        *(f"sends {_in_words(value)} to stage {', '.join(map(str, value.destinations))}" for value in stage.sends),
        *(f"holds a shard of {name}: {graphs.placements[name]}" for name in split),
        *(f"holds a run of the experts of {name}" for name in stage.parameters if name in graphs.experts),
        *(f"sums the gradient of {name} with the other stages that hold it" for name in stage.shared_parameters),
    ]


def _commented(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _body(graphs: RankGraphs, index: int) -> str:
    module = graphs.stages[index].graph_module
    body = module.print_readable(print_output=False, include_stride=False, include_device=False)
    return "\n" + body.strip() + "\n"


def _in_words(value: Value) -> str:
    sizes = ", ".join(_size(per_sample, constant) for per_sample, constant in value.sizes)
    return f"{value.name} [{sizes}] {str(value.dtype).removeprefix('torch.')}"


def _size(per_sample: int, constant: int) -> str:
    if not per_sample:
        return str(constant)
    product = "batch" if per_sample == 1 else f"{per_sample}*batch"
    return f"{product}+{constant}" if constant else product

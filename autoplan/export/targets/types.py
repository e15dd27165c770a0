"""What every target has in common: a plan in, files out; a file in, a strategy out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import StrategyError
from autoplan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """``files``: text by name. ``launch``: the command. ``lost``: what the target cannot express of the plan, each with
    the nearest that it can."""

    files: dict[str, str]
    launch: str
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """``strategy``: keys of ``--strategy``. ``gpus``: processes, None where the file does not say. ``compiled``: under
    torch.compile."""

    strategy: dict[str, Any]
    gpus: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    seq: int | None = None
    compiled: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``releases`` that names and meanings were read in; the first is written."""

    name: str
    releases: tuple[str, ...]
    export: Callable[[Plan], Exported]
    read: Callable[[str], Imported]


@dataclass(slots=True)
class Losses:
    """Collects what is lost, and refuses what cannot be done at all."""

    target: str
    notes: list[str] = field(default_factory=list)

    def note(self, condition: bool, text: str) -> None:
        if condition:
            self.notes.append(text)

    def refuse(self, condition: bool, what: str, attempt: str) -> None:
        if condition:
            raise StrategyError(f"{self.target} cannot express {what}", where="strategy", attempt=attempt)


def recompute_of(plan: Plan) -> tuple[str, bool]:
    """(the policy of most layers that have one, else none; whether all layers follow it)."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        for policy, count in stage.recompute.items():
            counts[policy] = counts.get(policy, 0) + count
    used = {policy: count for policy, count in counts.items() if count and policy != "none"}
    if not used:
        return "none", True
    policy = max(used, key=lambda name: (used[name], name))
    return policy, used[policy] == sum(counts.values())


def layers_of(plan: Plan) -> list[int]:
    """Layers a stage, in model order."""
    return [stage.last_layer - stage.first_layer + 1 for stage in plan.stages]


def blocks_of(plan: Plan) -> list[int]:
    """Numbered layers (``model.layers.3``) a stage: what other tools count as layers."""
    names = plan.model.layers
    return [
        sum(any(part.isdigit() for part in names[i].split(".")) for i in range(s.first_layer, s.last_layer + 1))
        for s in plan.stages
    ]


def uneven(counts: list[int]) -> bool:
    return len(set(counts)) > 1


def nodes_and_each(plan: Plan) -> tuple[int, int]:
    """(nodes, processes a node) of the GPUs that the plan uses; of nodes of unequal size, the largest's."""
    if machines := plan.cluster.machines_used:
        each = min(plan.gpus_used, max(gpus for _, gpus in machines))
        return sum(number for number, _ in machines), each
    used, each = plan.gpus_used, plan.cluster.gpus_per_node
    return (1, used) if used <= each else (-(-used // each), each)


def torchrun(plan: Plan, script: str) -> str:
    nodes, each = nodes_and_each(plan)
    where = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {each}{where} {script}"


def header(plan: Plan) -> list[str]:
    """Lines of a comment that say where a file comes from."""
    return [
        f"autoplan export of a plan for {plan.model.name} on {plan.cluster.spec}: {plan.strategy.describe()}",
        f"global batch {plan.global_batch}, {plan.precision}, {plan.optimizer}",
    ]


STRATEGY_KEYS = (
    "data",
    "tensor",
    "pipeline",
    "virtual_stages",
    "context",
    "expert",
    "zero_stage",
    "micro_batch_size",
    "schedule",
    "sequence_parallel",
)


def strategy_text(plan: Plan) -> str:
    """The strategy as ``--strategy`` takes it."""
    strategy = plan.strategy
    values = {key: getattr(strategy, key) for key in STRATEGY_KEYS}
    policy, everywhere = recompute_of(plan)
    if everywhere:
        values["recompute"] = policy
    return ",".join(f"{key}={str(value).lower()}" for key, value in values.items())

"""Plans as settings of other tools, and back: one file a tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autoplan.errors import StrategyError
from autoplan.export.targets import accelerate, deepspeed, fsdp2, hugging_face, megatron, schedulers, torchtitan
from autoplan.export.targets.types import Exported, Imported, Target
from autoplan.plan import Plan


def _naming_kinds(export: Callable[[Plan], Exported]) -> Callable[[Plan], Exported]:
    """``export``, which also says where ranks must stand on a cluster of several kinds: no tool's file holds that."""

    def exported(plan: Plan) -> Exported:
        found = export(plan)
        return dataclasses.replace(found, lost=(*found.lost, *_places(plan)))

    return exported


def _places(plan: Plan) -> list[str]:
    said = starting(plan)
    return [f"which machine is which: {said[0]}", *said[1:]] if said else []


def starting(plan: Plan) -> list[str]:
    """How machines of several kinds are to be started, so that stages stand on theirs; [] where all are alike."""
    used = plan.cluster.groups_used
    if not used:
        return []
    said = [
        f"ranks {plan.cluster.ranks_of_groups}; the c10d rendezvous numbers machines as they come, so start each by "
        "torchrun --rdzv-backend static --node-rank N --master-addr HOST, in this order"
    ]
    if len({group.gpus_per_node for group in used}) > 1:
        each = ", ".join(f"{group.gpus_per_node} on {group.name}" for group in used)
        said.append(f"machines of unequal size: give --nproc-per-node {each}")
    return said


TARGETS: dict[str, Target] = {
    target.name: dataclasses.replace(target, export=_naming_kinds(target.export))
    for target in (
        torchtitan.TARGET,
        megatron.TARGET,
        deepspeed.TARGET,
        accelerate.TARGET,
        fsdp2.TARGET,
        hugging_face.TARGET,
        schedulers.SLURM,
        schedulers.KUBERNETES,
    )
}

__all__ = ["TARGETS", "Exported", "Imported", "Target", "starting", "target_named"]


def target_named(name: str) -> Target:
    """``torchtitan`` or ``torchtitan@0.3``; raises StrategyError for what is not known."""
    plain, _, release = name.partition("@")
    target = TARGETS.get(plain.lower())
    if target is None:
        raise StrategyError(f"no tool called {plain!r} is known", where="--to", legal=", ".join(TARGETS))
    if release and release not in target.releases:
        raise StrategyError(
            f"names of {plain} {release} are not known",
            where="--to",
            legal=", ".join(f"{plain}@{r}" for r in target.releases),
        )
    return target

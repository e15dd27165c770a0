"""Plans as settings of other tools, and back: one file a tool."""

from __future__ import annotations

from autoplan.errors import StrategyError
from autoplan.export.targets import accelerate, deepspeed, fsdp2, hugging_face, megatron, schedulers, torchtitan
from autoplan.export.targets.types import Exported, Imported, Target

TARGETS: dict[str, Target] = {
    target.name: target
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

__all__ = ["TARGETS", "Exported", "Imported", "Target", "target_named"]


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

"""A plan within what another tool can express, to compare a free plan with what somebody has today."""

from __future__ import annotations

from typing import Any

from autoplan.errors import StrategyError

# Keys of --strategy, with bounds where a tool offers several values.
LIKE: dict[str, dict[str, Any]] = {
    "ddp": {"tensor": 1, "pipeline": 1, "zero_stage": 0},
    "fsdp2": {"tensor": 1, "pipeline": 1, "zero_stage": "2|3"},
    "megatron": {"zero_stage": "<=1"},
    "deepspeed-zero1": {"tensor": 1, "pipeline": 1, "zero_stage": 1},
    "deepspeed-zero2": {"tensor": 1, "pipeline": 1, "zero_stage": 2},
    "deepspeed-zero3": {"tensor": 1, "pipeline": 1, "zero_stage": 3},
    "deepspeed-pipeline": {"tensor": 1, "zero_stage": "<=1", "schedule": "1f1b"},
    "accelerate": {"pipeline": 1, "zero_stage": "2|3"},
    "torchtitan": {"zero_stage": "!=1"},
}


def strategy_like(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The strategy keys that ``name`` can express, with the user's own. Raises StrategyError for a name that is not
    known, and where a key of the user's is none that the tool can express."""
    limits = LIKE.get(name.lower())
    if limits is None:
        raise StrategyError(f"no tool called {name!r} is known", where="--like", legal=", ".join(LIKE))
    for key, limit in limits.items():
        if key in given and given[key] != limit:
            raise StrategyError(
                f"`{key}` {given[key]} was asked for, and {name} has {key} {limit}",
                where="--like",
                attempt=f"leave `{key}` out, or --like another tool",
            )
    return {**given, **limits}

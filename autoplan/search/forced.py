"""The user's strategy keys, checked against the model, the batch and the cluster, one clear error a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoplan.errors import StrategyError
from autoplan.schedules import CHUNKED, EVENLY_SPLIT, SCHEDULES
from autoplan.search.constraints import LIMITS
from autoplan.search.degrees import counts, divisors, tensor_degrees
from autoplan.search.problem import Problem

KEYS = (
    "data",
    "tensor",
    "pipeline",
    "virtual_stages",
    "context",
    "expert",
    "zero_stage",
    "micro_batch_size",
    "schedule",
    "recompute",
    "sequence_parallel",
)
DEGREES = ("data", "tensor", "pipeline")
_LATER = {"context": "context parallelism", "expert": "expert parallelism"}
_LATER_ATTEMPT = "`predict` prices it; leave it out to plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Checked keys; None where the search decides. ``others`` are keys given at their only offered value."""

    data: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    recompute: str | None = None

    @property
    def product(self) -> int:
        """Product of the forced degrees."""
        return (self.data or 1) * (self.tensor or 1) * (self.pipeline or 1)

    @property
    def names_a_degree(self) -> bool:
        return any(getattr(self, name) is not None for name in DEGREES)


def read_forced(problem: Problem) -> Forced:
    """Check ``problem.forced``; raises :class:`StrategyError` that states the legal values."""
    for key in problem.forced:
        if key not in KEYS:
            raise StrategyError(f"unknown strategy key `{key}`", legal=", ".join((*KEYS, *LIMITS)))
    values: dict[str, Any] = {key: _read(key, value) for key, value in problem.forced.items()}
    for key in ("context", "expert", "sequence_parallel"):
        values.pop(key, None)
    forced = Forced(**values)
    checks = (
        _check_choices,
        _check_pipeline,
        _check_chunks,
        _check_sequence,
        _check_tensor,
        _check_product,
        _check_batch,
        _check_zero,
    )
    for check in checks:
        check(problem, forced)
    return forced


def _read(key: str, value: Any) -> int | str | bool:
    if key == "sequence_parallel":
        return _read_flag(key, value)
    if key == "schedule":
        return _read_schedule(value)
    if key == "recompute":
        if not isinstance(value, str):
            raise _wrong(key, value, "none, selective, full")
        return value
    number = _whole(value)
    lowest = 0 if key == "zero_stage" else 1
    legal = "0, 1, 2, 3" if key == "zero_stage" else "a whole number from 1"
    if number is None or number < lowest or (key == "zero_stage" and number > 3):
        raise _wrong(key, value, legal)
    if key in _LATER and number > 1:
        raise StrategyError(f"`{key}` {number}: {_LATER[key]} is not offered yet", legal="1", attempt=_LATER_ATTEMPT)
    return number


def _read_flag(key: str, value: Any) -> bool:
    given = {"true": True, "false": False}.get(str(value).lower())
    if given is None:
        raise _wrong(key, value, "true, false")
    return given


def _read_schedule(value: Any) -> str:
    if value not in SCHEDULES:
        raise _wrong("schedule", value, ", ".join(SCHEDULES))
    return str(value)


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return value if isinstance(value, int) else None


def _wrong(key: str, value: Any, legal: str) -> StrategyError:
    return StrategyError(f"`{key}` cannot be {value!r}", where=f"strategy key `{key}`", legal=legal)


def _check_choices(problem: Problem, forced: Forced) -> None:
    offered: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("zero_stage", forced.zero_stage, problem.zero_stages),
        ("recompute", forced.recompute, problem.recompute_policies),
        ("schedule", forced.schedule, problem.schedules),
    )
    for key, value, legal in offered:
        if value is not None and value not in legal:
            raise StrategyError(
                f"`{key}` {value} cannot be used here: the runtime does not execute it yet",
                where=f"strategy key `{key}`",
                legal=", ".join(map(str, legal)),
                attempt="`plan` and `predict` price it" if key != "schedule" else "",
            )


def _check_product(problem: Problem, forced: Forced) -> None:
    gpus, node = problem.cluster.gpus, problem.cluster.gpus_per_node
    given = {name: getattr(forced, name) for name in DEGREES if getattr(forced, name) is not None}
    if not given or counts(problem, forced, ()):
        return
    words = " x ".join(f"{name} {degree}" for name, degree in given.items())
    product = f" = {forced.product}" if len(given) > 1 else ""
    relation = "needs more than" if forced.product > gpus else "leaves part of a node idle among"
    raise StrategyError(
        f"{words}{product} {relation} the {gpus} GPUs of {problem.cluster.spec}",
        where="strategy key " + ", ".join(f"`{name}`" for name in given),
        legal=f"degrees whose product is at most {min(node, gpus)}"
        + (f", or that {gpus // node} whole nodes of {node} hold" if gpus > node else ""),
        attempt=_nearest_count(problem, forced),
    )


def _nearest_count(problem: Problem, forced: Forced) -> str:
    """The least number of GPUs that holds the degrees, in nodes like these."""
    node = problem.cluster.gpus_per_node
    least = forced.product if forced.product <= node else math.lcm(forced.product, node)
    return f"{least} GPUs, or smaller degrees"


def _check_pipeline(problem: Problem, forced: Forced) -> None:
    layers = len(problem.layers.layers)
    if forced.pipeline and forced.pipeline > layers:
        raise StrategyError(
            f"pipeline {forced.pipeline} needs as many layers, and {problem.layers.name} has {layers}",
            where="strategy key `pipeline`",
            legal=f"1 to {layers}",
        )


def _check_chunks(problem: Problem, forced: Forced) -> None:
    """Several stages a GPU need the interleaved schedule, a pipeline, and as many layers."""
    virtual, layers = forced.virtual_stages, len(problem.layers.layers)
    if forced.schedule in EVENLY_SPLIT and forced.pipeline is None and min(problem.cluster.gpus, layers) == 1:
        raise StrategyError(
            f"schedule {forced.schedule} needs a pipeline, and there is one "
            f"{'GPU' if problem.cluster.gpus == 1 else 'layer'}",
            where="strategy key `schedule`",
            legal="1f1b or gpipe, which one stage runs alike",
        )
    if virtual is None or virtual == 1:
        return
    if forced.schedule not in (None, *CHUNKED):
        raise StrategyError(
            f"virtual_stages {virtual} puts several stages on a GPU, and schedule {forced.schedule} has one",
            where="strategy key `virtual_stages`, `schedule`",
            legal="virtual_stages 1, or schedule interleaved",
            attempt=f"strategy={{'virtual_stages': {virtual}, 'schedule': 'interleaved'}}",
        )
    if forced.pipeline == 1:
        raise StrategyError(
            f"virtual_stages {virtual} needs a pipeline, and pipeline 1 was forced",
            where="strategy key `virtual_stages`, `pipeline`",
            legal="virtual_stages 1, or pipeline from 2",
        )
    least = (forced.pipeline or 2) * virtual
    if least > layers:
        raise StrategyError(
            f"pipeline {forced.pipeline or 2} x virtual_stages {virtual} needs {least} layers, and "
            f"{problem.layers.name} has {layers}",
            where="strategy key `virtual_stages`",
            legal=f"1 to {max(1, layers // (forced.pipeline or 2))}",
        )


def _check_sequence(problem: Problem, forced: Forced) -> None:
    if not problem.sequence_forced:
        return
    where = "strategy key `sequence_parallel`"
    if problem.sequence_kinds is None or problem.cluster.groups:
        here = "on clusters of several kinds of GPUs" if problem.cluster.groups else "beside a context or expert axis"
        raise StrategyError(f"`sequence_parallel` true is not offered {here}", where=where, legal="false")
    if not any(degree > 1 for degree in tensor_degrees(problem, forced)):
        raise StrategyError(
            "`sequence_parallel` true splits the sequence over the tensor axis, and there is none",
            where=where,
            legal="false, or a tensor degree of at least 2 on as many GPUs",
            attempt="strategy={'tensor': 2, 'sequence_parallel': True}",
        )


def _check_tensor(problem: Problem, forced: Forced) -> None:
    if forced.tensor and forced.tensor > 1:
        problem.kinds(forced.tensor, sequence=problem.sequence_forced)  # raises with the reason


def _check_batch(problem: Problem, forced: Forced) -> None:
    batch, data, micro = problem.global_batch, forced.data, forced.micro_batch_size
    if problem.batch_coupling:
        for key, value, legal in (("data", data, 1), ("micro_batch_size", micro, batch)):
            if value not in (None, legal):
                raise StrategyError(
                    f"`{key}` {value} splits the batch, and that would change the numbers: {problem.batch_coupling}",
                    where=f"strategy key `{key}`",
                    legal=str(legal),
                    attempt="use pipeline or tensor, which leave the batch whole",
                )
    fixed = problem.fixed_micro_batch
    if fixed and micro not in (None, fixed):
        raise StrategyError(
            f"micro_batch_size {micro} cannot be run: the graph was traced at batch {fixed} only",
            where="strategy key `micro_batch_size`",
            legal=str(fixed),
        )
    if batch % ((data or 1) * (micro or fixed or 1)):
        raise _indivisible(batch, data, micro or fixed)


def _indivisible(batch: int, data: int | None, micro: int | None) -> StrategyError:
    words = " x ".join(
        f"{name} {value}" for name, value in (("data", data), ("micro_batch_size", micro)) if value is not None
    )
    product = (data or 1) * (micro or 1)
    lower = batch // product * product
    attempt = f"global_batch={lower or product}" + (f" or {lower + product}" if lower else "")
    return StrategyError(
        f"global batch {batch} is not divisible by {words}{f' = {product}' if data and micro else ''}",
        legal=f"products of data and micro_batch_size that divide {batch}: {_listed(divisors(batch))}",
        attempt=attempt,
    )


def _check_zero(problem: Problem, forced: Forced) -> None:
    if not forced.zero_stage:
        return
    without: Callable[[str], StrategyError] = lambda why: StrategyError(  # noqa: E731
        f"zero_stage {forced.zero_stage} shards state over the data axis, {why}",
        where="strategy key `zero_stage`",
        legal="0, or data from 2",
    )
    if forced.data == 1:
        raise without("and data 1 was forced")
    if problem.batch_coupling:
        raise without(f"and this batch cannot be split: {problem.batch_coupling}")
    rest = (forced.tensor or 1) * (forced.pipeline or 1)
    if forced.data is None and not any(
        n % rest == 0 and any(d > 1 and problem.global_batch % d == 0 for d in divisors(n // rest))
        for n in counts(problem, forced, tensor_degrees(problem, forced))
    ):
        raise without(f"and {problem.cluster.gpus} GPUs with a global batch of {problem.global_batch} leave it no GPUs")


def _listed(values: tuple[int, ...]) -> str:
    if len(values) <= 16:
        return ", ".join(map(str, values))
    return ", ".join(map(str, values[:12])) + f", ..., {values[-1]}"

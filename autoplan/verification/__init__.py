"""Proof before the machines are rented: does this plan's program compute this model's training step?

Two checks. *Static*, for any number of ranks, runs nothing: see :mod:`.static`. *Numeric* runs a smaller copy of the
model under the plan with smaller degrees, on forked CPU processes in float64, and compares with one process: see
:mod:`.numeric`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from autoplan.verification.types import Check, Difference, LayerNumbers, Numeric, VerifyReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoplan.plan import Plan

__all__ = ["Check", "Difference", "LayerNumbers", "Numeric", "VerifyReport", "verify"]


def verify(
    model: Any,
    plan: Plan | str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    static: bool = False,
    ranks: int = 16,
) -> VerifyReport:
    """Whether ``plan``'s program for ``model`` computes the single process's numbers, and what differs first.

    ``model``: a module, a factory that returns one (or ``(model, example_inputs)``, or with a loss_fn third), or MODEL
    as the command line takes it; on ``meta`` is enough for a Hugging Face model. ``plan``: a plan, or the path of a
    plan file. ``example_inputs`` and ``loss_fn`` as
    for :func:`autoplan.compile`. ``static``: prove what needs no run, and leave it there. ``ranks``: how many processes
    the numeric check may fork; larger plans are reduced, and the report says how.

    Raises :class:`PlanFileError` for a plan that was made for another model, other AutoplanErrors for bad input. What
    the runtime cannot execute is reported as not executable, and is then not equal.
    """
    from autoplan.verification.subject import loaded, prepare, small_source

    plan = loaded(plan)
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    whole = prepare(model, plan, example_inputs, loss_fn)
    seconds["capture"], started = round(time.perf_counter() - started, 3), time.perf_counter()
    from autoplan.verification.static import check_static

    checks, programs = check_static(whole.capture, whole.layers, plan, whole.cluster)
    seconds["static"], started = round(time.perf_counter() - started, 3), time.perf_counter()
    numeric = Numeric(status="not run", reason="only the static check was asked for")
    if not static:
        from autoplan.verification.numeric import check_numbers

        source, inputs = small_source(model, whole)
        numeric, own = check_numbers(
            source,
            inputs,
            whole.loss_fn,
            captured=whole.capture,
            sharding=programs.sharding if programs is not None else None,
            plan=plan,
            cluster=whole.cluster,
            ranks=ranks,
        )
        checks += tuple(check for check in own if not check.ok and check.name != "memory")
        seconds["numeric"] = round(time.perf_counter() - started, 3)
    return VerifyReport(
        model=plan.model.name, strategy=plan.strategy, gpus=plan.gpus, static=checks, numeric=numeric, seconds=seconds
    )

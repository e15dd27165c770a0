"""Whether a plan's parts agree with each other: what a schema cannot say.

A plan file is edited, merged and passed on. One that contradicts itself must not be drawn, compared or trained, so it
is refused on reading, by the field that disagrees and what the others say of it. Two nets, one behind the other:

- *What the plan says of itself*, here: most figures of a plan follow from others of it. Degrees multiply to GPUs,
  states come from parameters by the precision's bytes and the ZeRO stage, the step from the stages' times through the
  schedule simulator, the bubble from the step, the terms from the stages, the proof's gaps from its bounds. A module
  for each part.
- *The file's digest* (:mod:`autoplan.plan_file`), last: what no check can know (a layer's name, the seconds of a layer
  that is not traced again) is at least as it was written.

The digest alone would refuse every edit, but say of none what is wrong with it, and a file whose digest was made anew
would pass; the checks alone leave what nothing in the file speaks of. What older files do not hold, or follows from
figures that later versions of autoplan may correct (bytes of a precision), is asked of plans that were first written
with a digest alone: an older one was right when it was made. Such plans are known by their ``first_revision``, and
whoever reads one is told (:attr:`Plan.unchecked`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.axes import axes, transfers
from autoplan.consistency.comparison import not_its_cluster, other_cluster, other_count, other_model
from autoplan.consistency.fields import missing, numbers, texts
from autoplan.consistency.forced import forced
from autoplan.consistency.layers import layers
from autoplan.consistency.machines import machines, peaks
from autoplan.consistency.memory import memory, states
from autoplan.consistency.problems import Problem
from autoplan.consistency.proof import proof
from autoplan.consistency.reasons import reasons
from autoplan.consistency.strategies import strategies
from autoplan.consistency.times import figures, step
from autoplan.plan_file import DIGEST_SINCE

if TYPE_CHECKING:
    from autoplan.plan import Plan

__all__ = [
    "Problem",
    "first_problem",
    "missing",
    "not_its_cluster",
    "other_cluster",
    "other_count",
    "other_model",
]

Check = Callable[["Plan"], Iterator[Problem]]

# Each may take for granted what those before it have asked.
_ALWAYS: tuple[Check, ...] = (texts, numbers, strategies, machines, layers, memory, figures, axes)
# The rest by the revision of a plan's first file: older ones lack what they ask, or it was priced otherwise then.
_SINCE: tuple[tuple[int, Check], ...] = (
    (2, forced),
    (DIGEST_SINCE, states),
    (3, step),
    (2, transfers),
    (2, proof),
    (2, reasons),
    (DIGEST_SINCE, peaks),
)


def first_problem(plan: Plan) -> Problem | None:
    """The first field that disagrees with the others, and how; None for a plan that is whole."""
    checks = (*_ALWAYS, *(check for since, check in _SINCE if plan.first_revision >= since))
    return next((problem for check in checks for problem in check(plan)), None)

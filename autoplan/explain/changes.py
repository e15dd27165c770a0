"""What would change the decision: what would beat the plan on other machines, what would only fit, and what would
change nothing.

Either the search was asked (:mod:`autoplan.what_if`), and each line is what it decides there; or plans are compared
with their stages as they are, which a line says of the plans that it names and of no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from autoplan.explain.text import heading, paragraph, percent, rate, ratio, seconds, size
from autoplan.plan import Alternative, Crossing, OtherAnswer, Plan, Strategy

if TYPE_CHECKING:
    from pydantic import ConfigDict

_STRICT: ConfigDict = {"extra": "forbid", "strict": False}
_ALIKE = "all GPUs alike"  # a way to use several kinds, as the search calls it
# Of the step: nearer than the first less parallelism wins, and whole state is sharded only for more than the second.
AS_FAST, SHARDING_GAIN = 0.02, 0.10
Kind = Literal["chosen", "fits", "unchanged"]

_UNPRICED: Kind = "fits"
_HEADINGS: dict[Kind, tuple[str, str]] = {  # where plans keep their stages, and where the search decided
    "chosen": ("Would be preferred to this plan:", "Another plan would be chosen:"),
    "fits": ("Would fit:", ""),
    "unchanged": ("Would change nothing:", "The same plan would be chosen:"),
}
_AS_THEY_ARE = (
    "This compares this plan and those above with their stages as they are. A search on such machines cuts stages and "
    "recomputes anew: it may find a better plan than is named here, and leave this one sooner. To search:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """``condition``, on which ``strategy`` is compared with the plan: ``quantity`` (``memory_bytes`` of a GPU,
    ``intra_bytes_per_s``, ``inter_bytes_per_s``) at ``value``. ``verdict`` is the rest of the sentence.

    ``kind``: it is preferred (``chosen``), only fits (``fits``), or nothing changes (``unchanged``). Without a strategy
    the plan stays there or, where it is ``chosen``, nothing fits.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Kind
    condition: str
    quantity: str
    value: float
    strategy: Strategy | None
    step_time_s: float | None
    verdict: str

    @property
    def sentence(self) -> str:
        return f"{self.condition}: {self.verdict}"


def thresholds(plan: Plan) -> tuple[Threshold, ...]:
    """Those that the search found where it was asked; else those that were found with the decision."""
    if plan.other_answers:
        return tuple(_searched(plan, answer) for answer in plan.other_answers)
    return (*_memory(plan), *(_links(plan, crossing) for crossing in plan.crossings if _is_link(crossing)), _less(plan))


def groups(plan: Plan) -> Iterator[tuple[str, list[Threshold]]]:
    """The thresholds under a heading each kind."""
    found = thresholds(plan)
    for kind, headings in _HEADINGS.items():
        if of_kind := [each for each in found if each.kind == kind]:
            yield headings[bool(plan.other_answers)], of_kind


def command(file: str) -> str:
    """What searches again."""
    return f"autoplan explain {file} --what-if"


def basis(plan: Plan) -> str:
    """What the thresholds compare, where the search was not asked."""
    return "" if plan.other_answers else _AS_THEY_ARE


def would_change(plan: Plan, file: str = "PLAN.json") -> list[str]:
    """The section as lines."""
    lines = [heading("What would change the decision")]
    for title, found in groups(plan):
        lines += paragraph(title)
        for each in found:
            lines += paragraph(f"- {each.sentence}", hanging="  ")
    if basis(plan):
        lines += ["", *paragraph(basis(plan)), f"  {command(file)}"]
    return lines


def _is_link(crossing: Crossing) -> bool:
    return crossing.quantity != "memory_bytes"


def _memory(plan: Plan) -> Iterator[Threshold]:
    """What more memory would let fit: the fastest of those that need the same."""
    found: dict[str, Threshold] = {}
    for other in plan.alternatives:
        if other.step_time_s is not None:
            continue
        named = other.strategy.describe()
        priced, capacity = _priced(plan, other), _capacity(plan, other)
        step_s = priced.step_time_s if priced else None
        value = priced.value if priced else capacity + other.short_by_bytes
        if step_s is None:
            kind, verdict = (
                _UNPRICED,
                f"{named}; its step was not priced, so that only a search says whether it is preferred",
            )
        else:
            kind, verdict = _there(plan, other.strategy, step_s)
        more = f"{size(value - capacity)} more {_on(plan, other)}"
        if more not in found or (step_s or 0.0) < (found[more].step_time_s or 0.0):
            found[more] = Threshold(
                kind=kind,
                condition=f"with {more}",
                quantity="memory_bytes",
                value=value,
                strategy=other.strategy,
                step_time_s=step_s,
                verdict=verdict,
            )
    yield from found.values()


def _priced(plan: Plan, other: Alternative) -> Crossing | None:
    """``other`` on GPUs that just hold it, beside what is kept free; a strategy may be short on several kinds."""
    wanted = _capacity(plan, other) + other.short_by_bytes
    found = [c for c in plan.crossings if c.quantity == "memory_bytes" and c.strategy == other.strategy]
    return min(found, key=lambda crossing: abs(crossing.value - wanted), default=None)


def _capacity(plan: Plan, other: Alternative) -> float:
    """Bytes of the GPUs that ``other`` does not fit on: of the smallest of those that it is for."""
    of_kind = [group.memory_bytes for group in plan.cluster.groups if other.family == f"{group.name} alone"]
    if other.family == _ALIKE:
        of_kind = [group.memory_bytes for group in plan.cluster.groups]
    return min(of_kind or (plan.cluster.memory_of(stage) for stage in plan.stages))


def _on(plan: Plan, other: Alternative) -> str:
    """Which GPUs need more memory for ``other``."""
    named = next((group.name for group in plan.cluster.groups if other.family == f"{group.name} alone"), "")
    if other.family == _ALIKE and len({group.memory_bytes for group in plan.cluster.groups}) > 1:
        return "on each of the smallest GPUs"
    return f"on each GPU of {named}" if named else "on each GPU"


def _there(plan: Plan, strategy: Strategy, step_s: float) -> tuple[Kind, str]:
    """Whether a plan that fits with more memory is chosen over this one, and the sentence with the reason."""
    own, here_s = plan.strategy, plan.predicted.step_time_s
    longer = step_s / here_s
    pace = f"{percent(abs(longer - 1))} {'less' if longer < 1 else 'more'} than this plan"
    pace = f"{longer:,.1f} times as long as this plan" if longer >= 2 else pace
    told = f"{strategy.describe()}, {seconds(step_s)} a step, {pace}"
    if longer * (1 + AS_FAST) < 1:
        return "chosen", told
    if _same_degrees(own, strategy) and own.zero_stage and not strategy.zero_stage and longer < 1 + SHARDING_GAIN:
        return "chosen", f"{told}; whole state is preferred unless sharding it gains more than {SHARDING_GAIN:.0%}"
    if longer <= 1 + AS_FAST and _parallelism(strategy) < _parallelism(own):
        return "chosen", f"{told}; within {AS_FAST:.0%} less parallelism is preferred"
    if longer < 1:
        return "fits", f"{told}, too little for more parallelism to be preferred"
    return "fits", f"{told}, and so not preferred"


def _same_degrees(one: Strategy, other: Strategy) -> bool:
    return (one.data, one.tensor, one.pipeline) == (other.data, other.tensor, other.pipeline)


def _parallelism(strategy: Strategy) -> tuple[int, ...]:
    """Smaller is less, as :func:`autoplan.search.preferences.preference` orders them."""
    return len(strategy.axes), strategy.tensor, strategy.pipeline, strategy.zero_stage, strategy.data, strategy.gpus


def _less(plan: Plan) -> Threshold:
    """How much less memory the plan itself would do with."""
    fullest = min(plan.stages, key=lambda stage: plan.cluster.memory_of(stage) - stage.peak_memory_bytes)
    least = max(0.0, plan.cluster.memory_of(fullest) - fullest.peak_memory_bytes)
    return Threshold(
        kind="unchanged",
        condition=f"with up to {size(least)} less on each GPU",
        quantity="memory_bytes",
        value=plan.cluster.memory_of(fullest) - least,
        strategy=None,
        step_time_s=None,
        verdict="this plan still fits as it is; with less memory than that it does not",
    )


def margin(plan: Plan, strategy: Strategy) -> float:
    """By how much of its step ``strategy`` must be faster to be chosen over the plan, whichever is less parallel."""
    own = plan.strategy
    return SHARDING_GAIN if strategy.zero_stage and not own.zero_stage and own.data > 1 else AS_FAST


def _links(plan: Plan, crossing: Crossing) -> Threshold:
    where = _where(plan, crossing.quantity)
    strategy, step_s, times = crossing.strategy, crossing.step_time_s, crossing.factor
    if strategy is None or step_s is None:
        condition = f"with links {where} from 1/{times:g} to {times:g} times as fast"
        verdict = "none of the plans above gets ahead of this one by enough to be chosen"
    else:
        beyond = "or more" if times > 1 else "or less"
        condition = f"with about {rate(crossing.value)} a GPU {where} ({ratio(times)} times what it is) {beyond}"
        if plan.cluster.groups:  # which have links of their own
            condition = f"with links {where} about {ratio(times)} times as fast {beyond}"
        verdict = (
            f"{strategy.describe()}, {seconds(step_s)} a step there, over {margin(plan, strategy):.0%} less than "
            f"this plan there ({seconds(plan.predicted.step_time_s)} here)"
        )
    return Threshold(
        kind="unchanged" if strategy is None else "chosen",
        condition=condition,
        quantity=crossing.quantity,
        value=crossing.value,
        strategy=strategy,
        step_time_s=step_s,
        verdict=verdict,
    )


def _where(plan: Plan, quantity: str) -> str:
    """Which links they are."""
    if quantity != "inter_bytes_per_s":
        return "inside a node"
    return "between nodes and between kinds" if plan.cluster.groups else "between nodes"


def _searched(plan: Plan, answer: OtherAnswer) -> Threshold:
    same = answer.strategy is not None and answer.strategy.describe() == plan.strategy.describe()
    return Threshold(
        kind="unchanged" if same else "chosen",
        condition=f"with {answer.condition}",
        quantity=answer.quantity,
        value=answer.value,
        strategy=answer.strategy,
        step_time_s=answer.step_time_s,
        verdict=_decided(plan, answer, same=same),
    )


def _decided(plan: Plan, answer: OtherAnswer, *, same: bool) -> str:
    if answer.strategy is None or answer.step_time_s is None:
        return "nothing fits"
    change = answer.step_time_s / plan.predicted.step_time_s - 1
    pace = f"{percent(abs(change))} {'more' if change > 0 else 'less'} than here"
    if abs(change) < 5e-4:
        pace = "as here"
    decided = "the same decision" if same else answer.strategy.describe()
    return f"{decided}, {seconds(answer.step_time_s)} a step, {pace}"

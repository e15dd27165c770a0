"""Pipeline schedules as data: for each pipeline rank the ordered list of actions that it executes.

The same lists are executed by :mod:`autoplan.runtime`, priced by :mod:`autoplan.cost_models.schedule` and printed
in torch's compact notation (``0F1``: stage 0, forward, micro-batch 1). Plain data: imports nothing of ours. With v
virtual stages a rank holds v *chunks* of the model, which has S = p x v stages on p ranks.

- GPipe (Huang et al. 2019): all forwards, then all backwards; every micro-batch is in flight at once.
- 1F1B (PipeDream-flush, Narayanan et al. 2021): stage s warms up with min(M, S - s) forwards and then alternates, so
  at most min(M, S - s) micro-batches are in flight.
- Interleaved 1F1B (Narayanan et al. 2021, section 2.2): stage s on rank s mod p. Micro-batches come in groups of p,
  each group through chunk 0, then chunk 1, and so on; rank r warms up with 2 (p - 1 - r) + (v - 1) p + 1 forwards.
  Counts that are no multiple of p take the list of the next one and leave the first micro-batches out of it: what is
  left still follows an order in which the whole list could run, so it can't deadlock.
- Zero bubble ZB-H1 (Qi et al. 2024, section 3): a backward is split into the gradient of the inputs, "I", which the
  earlier stage waits for, and that of the weights, "W", which nobody does. Rank r warms up as under 1F1B and keeps r
  weight gradients back, with which it fills the time in which it would wait at the end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")
# Schedules under which a rank may hold several chunks.
CHUNKED: tuple[str, ...] = ("interleaved",)
# Schedules whose stages the search splits one way, the most even one (:mod:`autoplan.search.listed`).
EVENLY_SPLIT: tuple[str, ...] = ("interleaved", "zero_bubble")


class Action(NamedTuple):
    """One cell of a schedule. ``kind``: "F" forward, "B" backward; or in B's place "I", the gradients of the inputs,
    and later "W", those of the weights."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = tuple[Action, ...]


class Held(NamedTuple):
    """What a rank holds at one moment, a number of micro-batches for each of its chunks in model order: those whose
    ``activations`` wait for the backward, and those whose ``weight_gradients`` are not computed yet."""

    activations: tuple[int, ...]
    weight_gradients: tuple[int, ...]


# ------------------------------------------------------------------------------------------- which rank holds a stage


def rank_of_stage(stage: int, *, ranks: int) -> int:
    """The pipeline rank that holds model stage ``stage``."""
    return stage % ranks


def stages_of_rank(rank: int, *, stages: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """The model stages that a pipeline rank holds, in model order; ``stages`` counts all of the model's."""
    ranks = stages // virtual_stages
    return tuple(s for s in range(stages) if rank_of_stage(s, ranks=ranks) == rank)


def sends_a_micro_batch(*, ranks: int, virtual_stages: int = 1) -> int:
    """Messages that the rank with most of them sends for one micro-batch: from each of its stages but the model's last
    the activations, from each but the model's first their gradients. Between two ranks each holds one of those."""
    if ranks == 1:
        return 0
    return 2 * virtual_stages - (1 if ranks == 2 else 0)


# ------------------------------------------------------------------------------------------------------------ the lists


def in_flight(schedule: str, *, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations stage ``stage`` holds at once, where a rank holds one stage."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def chunks_in_flight(*, rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> int:
    """The most activations of chunks and micro-batches that an interleaved rank holds at once, where ``micro_batches``
    is a multiple of ``ranks``; elsewhere it holds at most as many as for the next multiple."""
    warm_up = 2 * (ranks - 1 - rank) + (virtual_stages - 1) * ranks + 1
    return min(-(-micro_batches // ranks) * ranks * virtual_stages, warm_up)


def stage_actions(schedule: str, *, stage: int, stages: int, micro_batches: int) -> Actions:
    """The ordered actions of the rank of ``stage``, where a rank holds one stage."""
    return rank_actions(schedule, rank=stage, stages=stages, micro_batches=micro_batches)


def all_actions(schedule: str, *, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Actions, ...]:
    """One action list a rank; ``schedule`` is one of :data:`SCHEDULES`, ``stages`` counts the model's stages."""
    return tuple(
        rank_actions(schedule, rank=r, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
        for r in range(stages // virtual_stages)
    )


def rank_actions(schedule: str, *, rank: int, stages: int, micro_batches: int, virtual_stages: int = 1) -> Actions:
    """The ordered actions of one pipeline rank. ``virtual_stages`` divides ``stages`` and is 1 unless ``schedule`` is
    one of :data:`CHUNKED`."""
    if schedule == "interleaved":
        return _interleaved(rank, stages // virtual_stages, virtual_stages, micro_batches)
    if schedule == "zero_bubble":
        return _zero_bubble(rank, stages, micro_batches)
    forwards = [Action(rank, "F", m) for m in range(micro_batches)]
    backwards = [Action(rank, "B", m) for m in range(micro_batches)]
    return _alternating(
        forwards, backwards, in_flight(schedule, stage=rank, stages=stages, micro_batches=micro_batches)
    )


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Actions:
    """``warm_up`` forwards, then a backward and a forward in turn."""
    actions = list(forwards[:warm_up])
    forward = warm_up
    for backward in backwards:
        actions.append(backward)
        if forward < len(forwards):
            actions.append(forwards[forward])
            forward += 1
    return tuple(actions)


def _interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> Actions:
    missing = -micro_batches % ranks
    order = [
        (chunk, micro_batch)
        for first in range(0, micro_batches + missing, ranks)
        for chunk in range(chunks)
        for micro_batch in range(first, first + ranks)
    ]
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    whole = _alternating(
        [Action(stages[chunk], "F", m) for chunk, m in order],
        [Action(stages[chunks - 1 - chunk], "B", m) for chunk, m in order],
        chunks_in_flight(rank=rank, ranks=ranks, virtual_stages=chunks, micro_batches=micro_batches),
    )
    return tuple(Action(s, kind, m - missing) for s, kind, m in whole if m >= missing)


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> Actions:
    warm_up = min(micro_batches, ranks - 1 - rank)
    steady = micro_batches - warm_up
    actions = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(micro_batches):
        if m < steady:
            actions.append(Action(rank, "F", warm_up + m))
        actions.append(Action(rank, "I", m))
        if m >= min(rank, steady):
            actions.append(Action(rank, "W", m - min(rank, steady)))
    return (*actions, *(Action(rank, "W", m) for m in range(micro_batches - min(rank, steady), micro_batches)))


# ------------------------------------------------------------------------------------------------------ what it holds


def held(schedule: str, *, rank: int, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Held, ...]:
    """What ``rank`` holds at the moments at which no other holds as much or more of everything."""
    ranks = stages // virtual_stages
    # The moments of a longer step are those of a step whose first, steady and last groups are all there.
    enough = 2 * ranks
    if schedule != "gpipe" and micro_batches > enough:
        micro_batches = enough + micro_batches % ranks
    return _held(schedule, rank, stages, micro_batches, virtual_stages)


@functools.lru_cache(maxsize=4096)
def _held(schedule: str, rank: int, stages: int, micro_batches: int, virtual_stages: int) -> tuple[Held, ...]:
    actions = rank_actions(
        schedule, rank=rank, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    own = stages_of_rank(rank, stages=stages, virtual_stages=virtual_stages)
    return tuple(_largest(_moments(actions, own)))


def _moments(actions: Iterable[Action], own: Sequence[int]) -> set[Held]:
    """What is held ahead of the actions that let go of something: no moment between holds more."""
    index = {stage: chunk for chunk, stage in enumerate(own)}
    activations, weights = [0] * len(own), [0] * len(own)
    found = set()
    for stage, kind, _ in actions:
        chunk = index[stage]
        if kind == "F":
            activations[chunk] += 1
            continue
        found.add((*activations, *weights))
        if kind == "W":
            weights[chunk] -= 1
        else:
            activations[chunk] -= 1
            weights[chunk] += kind == "I"
    return {Held(moment[: len(own)], moment[len(own) :]) for moment in found}


def _largest(moments: Iterable[Held]) -> list[Held]:
    """Those that no other covers, in a fixed order."""
    kept: list[Held] = []
    for moment in sorted(moments, reverse=True):
        numbers = (*moment.activations, *moment.weight_gradients)
        if not any(
            all(a <= b for a, b in zip(numbers, (*o.activations, *o.weight_gradients), strict=True)) for o in kept
        ):
            kept.append(moment)
    return kept


def forward_actions(*, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Actions, ...]:
    """The lists of all ranks for forwards alone: micro-batches in groups of as many as there are ranks, each group
    through all of a rank's stages. There may be fewer micro-batches than stages."""
    ranks = stages // virtual_stages
    return tuple(
        tuple(
            Action(stage, "F", m)
            for first in range(0, micro_batches, ranks)
            for stage in stages_of_rank(rank, stages=stages, virtual_stages=virtual_stages)
            for m in range(first, min(first + ranks, micro_batches))
        )
        for rank in range(ranks)
    )


# ------------------------------------------------------------------------------------------------------------- checking


def first_problem(actions: Sequence[Sequence[Action]]) -> str | None:
    """What keeps lists, one a rank, from being a whole step that ends, in words; None where nothing does.

    Checked are: stages count from 0 and each has one rank; every stage runs every micro-batch forward once and backward
    once, whole or in two parts in their order; all stages take micro-batches in one order, forward and backward, as
    communicators that run their operations in order demand; and the lists can be run to their end.
    """
    return _incomplete(actions) or _unordered(actions) or _stuck(actions)


def first_forward_problem(actions: Sequence[Sequence[Action]]) -> str | None:
    """Likewise of lists of forwards alone, each stage's of every micro-batch once."""
    count = Counter(action for own in actions for action in own)
    every = {Action(stage, "F", m) for stage in {a.stage for a in count} for m in {a.micro_batch for a in count}}
    odd = next((action for action in sorted(every | set(count)) if count[action] != 1 or action not in every), None)
    if odd is not None:
        return f"{odd} is there {count[odd]} times"
    return _unordered(actions) or _stuck(actions)


def _incomplete(actions: Sequence[Sequence[Action]]) -> str | None:
    homes: dict[int, set[int]] = {}
    count: Counter[Action] = Counter()
    for rank, own in enumerate(actions):
        for action in own:
            homes.setdefault(action.stage, set()).add(rank)
        count.update(own)
    twice = next((action for action, times in count.items() if times > 1), None)
    if twice is not None:
        return f"{twice} is there twice"
    if sorted(homes) != list(range(len(homes))):
        return f"stages are {', '.join(map(str, sorted(homes)))}"
    shared = next((stage for stage, ranks in homes.items() if len(ranks) > 1), None)
    if shared is not None:
        return f"stage {shared} is on {len(homes[shared])} ranks"
    micro_batches = {action.micro_batch for action in count}
    for stage in range(len(homes)):
        for m in sorted(micro_batches):
            kinds = tuple(kind for kind in "FBIW" if count[Action(stage, kind, m)])
            if kinds not in (("F", "B"), ("F", "I", "W")):
                return f"stage {stage} runs {' and '.join(kinds) or 'nothing'} of micro-batch {m}"
    return None


def _unordered(actions: Sequence[Sequence[Action]]) -> str | None:
    orders: dict[str, dict[int, list[int]]] = {"F": {}, "I": {}}
    for own in actions:
        done: set[Action] = set()
        for action in own:
            stage, kind, m = action
            if kind == "W" and Action(stage, "I", m) not in done:
                return f"{action} comes before {stage}I{m}"
            done.add(action)
            if kind != "W":
                orders["F" if kind == "F" else "I"].setdefault(stage, []).append(m)
    for kind, by_stage in orders.items():
        for stage, order in by_stage.items():
            if order != by_stage[0]:
                way = "forward" if kind == "F" else "backward"
                return f"stages 0 and {stage} run micro-batches {way} in different orders"
    return None


def _stuck(actions: Sequence[Sequence[Action]]) -> str | None:
    last = max((action.stage for own in actions for action in own), default=0)
    done: set[tuple[str, int, int]] = set()
    positions = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while positions[rank] < len(own) and _runs(own[positions[rank]], done, last):
                stage, kind, m = own[positions[rank]]
                done.add(("B" if kind == "I" else kind, stage, m))
                positions[rank] += 1
                moved = True
    waiting = [str(own[at]) for own, at in zip(actions, positions, strict=True) if at < len(own)]
    return f"{', '.join(waiting)} wait on each other" if waiting else None


def _runs(action: Action, done: set[tuple[str, int, int]], last: int) -> bool:
    stage, kind, m = action
    if kind == "F":
        return stage == 0 or ("F", stage - 1, m) in done
    if kind == "W":
        return True
    return ("F", stage, m) in done and (stage == last or ("B", stage + 1, m) in done)

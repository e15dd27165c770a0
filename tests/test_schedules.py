"""Action lists of every schedule: whole steps, in the published order, that end on every number of ranks."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import schedules
from autoplan.schedules import Action, Held


@dataclasses.dataclass(frozen=True)
class Shape:
    """A schedule with its counts."""

    schedule: str
    ranks: int
    virtual_stages: int
    micro_batches: int

    @property
    def counts(self) -> dict[str, int]:
        stages = self.ranks * self.virtual_stages
        return {"stages": stages, "micro_batches": self.micro_batches, "virtual_stages": self.virtual_stages}


@st.composite
def shapes(draw: st.DrawFn, schedule: str | None = None) -> Shape:
    name = schedule or draw(st.sampled_from(schedules.SCHEDULES))
    return Shape(
        schedule=name,
        ranks=draw(st.integers(1, 9)),
        virtual_stages=draw(st.integers(1, 4)) if name in schedules.CHUNKED else 1,
        micro_batches=draw(st.integers(1, 40)),
    )


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


@given(shapes())
@settings(max_examples=400, deadline=None)
def test_every_list_is_a_whole_step_that_ends(shape: Shape) -> None:
    assert schedules.first_problem(schedules.all_actions(shape.schedule, **shape.counts)) is None


@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_list_that_lost_an_action_is_refused(shape: Shape, chance: random.Random) -> None:
    lists = [list(own) for own in schedules.all_actions(shape.schedule, **shape.counts)]
    own = chance.choice(lists)
    own.pop(chance.randrange(len(own)))
    if any(lists):
        assert schedules.first_problem(lists) is not None


@given(shapes(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_backward_before_its_forward_is_refused(shape: Shape, chance: random.Random) -> None:
    lists = [list(own) for own in schedules.all_actions(shape.schedule, **shape.counts)]
    own = chance.choice(lists)
    backward = chance.choice([action for action in own if action.kind in "BI"])
    own.remove(backward)
    own.insert(own.index(Action(backward.stage, "F", backward.micro_batch)), backward)
    assert schedules.first_problem(lists) is not None


def test_lists_that_wait_on_each_other_are_named() -> None:
    first, second = schedules.all_actions("1f1b", stages=2, micro_batches=2)
    late = (*second[2:], *second[:2])
    assert schedules.first_problem((first, late)) == "stages 0 and 1 run micro-batches forward in different orders"
    # Each rank's first forward of chunk 1 comes before the other's of chunk 0.
    crossed = (
        (Action(2, "F", 0), Action(0, "F", 0), Action(2, "B", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(3, "F", 0), Action(3, "B", 0), Action(1, "B", 0)),
    )
    assert schedules.first_problem(crossed) == "2F0, 1F0 wait on each other"


@pytest.mark.parametrize(
    ("lists", "problem"),
    [
        ([[Action(0, "F", 0), Action(0, "B", 0)], [Action(0, "F", 1), Action(0, "B", 1)]], "stage 0 is on 2 ranks"),
        ([[Action(1, "F", 0), Action(1, "B", 0)]], "stages are 1"),
        ([[Action(0, "F", 0), Action(0, "F", 0), Action(0, "B", 0)]], "0F0 is there twice"),
        ([[Action(0, "F", 0), Action(0, "I", 0)]], "stage 0 runs F and I of micro-batch 0"),
        ([[Action(0, "F", 0), Action(0, "W", 0), Action(0, "I", 0)]], "0W0 comes before 0I0"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(lists: list[list[Action]], problem: str) -> None:
    assert schedules.first_problem(lists) == problem


def test_1f1b_by_hand() -> None:
    assert written(schedules.stage_actions("1f1b", stage=0, stages=2, micro_batches=3)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert written(schedules.stage_actions("1f1b", stage=1, stages=2, micro_batches=3)) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_interleaved_is_megatrons_order() -> None:
    # Narayanan et al. 2021, figure 4: 2 ranks here, 2 chunks each, groups of 2 micro-batches.
    first, second = schedules.all_actions("interleaved", stages=4, virtual_stages=2, micro_batches=4)
    assert written(first) == ("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")
    assert written(second) == ("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


def test_interleaved_counts_that_are_no_multiple_leave_out_the_first() -> None:
    first, _ = schedules.all_actions("interleaved", stages=4, virtual_stages=2, micro_batches=3)
    assert written(first) == "0F0 2F0 0F1 0F2 2B0 2F1 2F2 0B0 2B1 2B2 0B1 0B2"


def test_zero_bubble_keeps_a_weight_gradient_back_for_each_rank_before() -> None:
    lists = schedules.all_actions("zero_bubble", stages=2, micro_batches=3)
    assert written(lists[0]) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert written(lists[1]) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"


@given(shapes("interleaved"))
@settings(deadline=None)
def test_interleaved_ranks_hold_what_the_closed_form_says(shape: Shape) -> None:
    for rank in range(shape.ranks):
        most = max(sum(h.activations) for h in schedules.held("interleaved", rank=rank, **shape.counts))
        closed = schedules.chunks_in_flight(
            rank=rank,
            ranks=shape.ranks,
            virtual_stages=shape.virtual_stages,
            micro_batches=shape.micro_batches,
        )
        assert most <= closed
        if shape.micro_batches % shape.ranks == 0:
            assert most == closed


@given(shapes("zero_bubble"))
@settings(deadline=None)
def test_zero_bubble_holds_no_more_activations_than_1f1b(shape: Shape) -> None:
    for rank in range(shape.ranks):
        moments = schedules.held("zero_bubble", rank=rank, **shape.counts)
        in_flight = schedules.in_flight("1f1b", stage=rank, stages=shape.ranks, micro_batches=shape.micro_batches)
        assert max(h.activations[0] for h in moments) == in_flight
        assert max(h.weight_gradients[0] for h in moments) <= min(rank + 1, shape.micro_batches)


@given(shapes())
@settings(max_examples=200, deadline=None)
def test_what_is_held_is_what_the_list_holds(shape: Shape) -> None:
    # Counted here action by action; `held` looks at a shorter step where the step is long.
    for rank in range(shape.ranks):
        own = schedules.rank_actions(shape.schedule, rank=rank, **shape.counts)
        found = schedules.held(shape.schedule, rank=rank, **shape.counts)
        stages = schedules.stages_of_rank(
            rank, stages=shape.ranks * shape.virtual_stages, virtual_stages=shape.virtual_stages
        )
        activations, weights = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        reached = set()
        for stage, kind, _ in own:
            activations[stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            weights[stage] += {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
            moment = Held(tuple(activations.values()), tuple(weights.values()))
            reached.add(moment)
            assert any(covers(most, moment) for most in found)
        assert reached >= set(found)


def covers(most: Held, moment: Held) -> bool:
    pairs = zip(
        (*most.activations, *most.weight_gradients), (*moment.activations, *moment.weight_gradients), strict=True
    )
    return all(b <= a for a, b in pairs)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]
)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_long_step_holds_what_a_shorter_one_does(schedule: str, virtual_stages: int, ranks: int) -> None:
    """The moments of a step are looked up in a shorter one with the same rest of micro-batches."""
    stages = ranks * virtual_stages
    for micro_batches in range(2 * ranks + 1, 5 * ranks + 1):
        for rank in range(ranks):
            whole = schedules._held(schedule, rank, stages, micro_batches, virtual_stages)
            found = schedules.held(
                schedule, rank=rank, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
            )
            assert set(found) == set(whole)


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_messages_are_those_that_the_busiest_rank_sends(ranks: int, virtual_stages: int) -> None:
    """A forward hands on activations, a backward gradients, to the rank of the next or the previous stage."""
    stages, micro_batches = ranks * virtual_stages, 2 * ranks
    name = "interleaved" if virtual_stages > 1 else "1f1b"
    sent = [
        sum(
            schedules.rank_of_stage(to, ranks=ranks) != rank
            for stage, kind, _ in own
            if 0 <= (to := stage + 1 if kind == "F" else stage - 1) < stages
        )
        for rank, own in enumerate(
            schedules.all_actions(name, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
        )
    ]
    each = schedules.sends_a_micro_batch(ranks=ranks, virtual_stages=virtual_stages)
    assert max(sent) == micro_batches * each

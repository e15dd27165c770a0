"""capture_folded gives what capture gives: the same graph, node by node, names included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoplan.capture as room
from autoplan.capture import Capture, capture, capture_folded
from autoplan.capture.alike import Alike
from autoplan.capture.folding import Folding, folded
from autoplan.layers import build_layers
from tests.support.models import mlp, nano_gpt, tiny_t5

HIDDEN = 16


def rows(captured: Capture) -> list[tuple[Any, ...]]:
    """All that other rooms read of a graph."""
    return [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            str(node.meta.get("val")),
            list((node.meta.get("nn_module_stack") or {}).values()),
            node.meta.get("stack_trace"),
        )
        for node in captured.graph_module.graph.nodes
    ]


@contextlib.contextmanager
def observed() -> Iterator[list[Folding]]:
    """The foldings that captures inside try, in order."""
    found: list[Folding] = []

    @contextlib.contextmanager
    def noting(alike: Alike, *, spare: int) -> Iterator[Folding]:
        with folded(alike, spare=spare) as folding:
            found.append(folding)
            yield folding

    with mock.patch.object(room, "folded", noting):
        yield found


def assert_same(model: nn.Module, batch: Any) -> int:
    """Both captures of ``model`` are the same. Returns how many blocks were folded; 0 if none could be."""
    whole = capture(model, batch)
    state = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with observed() as foldings:
        fast = capture_folded(model, batch)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == state
    assert rows(fast) == rows(whole)
    assert build_layers(fast) == build_layers(whole)
    for name in ("loss_terms", "couplings", "notes", "tied", "inputs", "tokens_per_sample", "dtype", "dynamic_batch"):
        assert getattr(fast, name) == getattr(whole, name), name
    fast_parameters = dict(fast.graph_module.named_parameters(remove_duplicate=False))
    assert fast_parameters.keys() == dict(whole.graph_module.named_parameters(remove_duplicate=False)).keys()
    assert all(fast_parameters[name] is tensor for name, tensor in model.named_parameters())
    return 0 if not foldings or foldings[-1].reason else sum(call.folded for call in foldings[-1].calls)


def test_of_six_blocks_the_first_two_and_the_last_are_traced() -> None:
    assert assert_same(*nano_gpt(layers=6)) == 3


def test_nothing_of_ours_looks_into_what_is_not_traced() -> None:
    """A look would cost a trace: the first is given up, and the next starts with all blocks full."""
    with mock.patch.object(room, "_capture", wraps=room._capture) as traced:
        capture_folded(*nano_gpt(layers=6))
    assert traced.call_count == 1


@pytest.mark.wide
def test_the_first_block_of_t5_holds_the_position_bias_and_is_no_other_blocks_kind() -> None:
    """Encoder and decoder: block 0 is its own, of the others 1, 2 and 5 are traced."""
    assert assert_same(*tiny_t5(layers=6)) == 2 * 2


@pytest.mark.wide
def test_models_with_few_or_small_blocks_are_traced_whole() -> None:
    assert assert_same(*nano_gpt(layers=3)) == 0
    assert assert_same(*mlp()) == 0


class Block(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """``layers`` blocks in a row; subclasses change what each test is about."""

    def __init__(self, kind: type[Block] = Block, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind(index) for index in range(layers)])

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.run(x), y)


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6, HIDDEN), "y": torch.randn(4, 6, HIDDEN)}


def test_a_counter_that_no_forward_reads_does_not_matter() -> None:
    """The first block is called in a way of its own: its input has no gradient. So 1, 2 and 7 are the examples."""
    assert assert_same(Stack(), batch()) == 4


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Late(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.index < 5 else x.relu() + super().forward(x)


class Chosen(Block):
    table = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table[self.index]


class Asking(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if f"{self.index}" in "0 1 2 3 7" else super().forward(-x)


@pytest.mark.parametrize(
    "kind", [Scaled, *(pytest.param(kind, marks=pytest.mark.wide) for kind in (Late, Chosen, Asking))]
)
def test_a_block_that_reads_its_counter_is_traced_whole(kind: type[Block]) -> None:
    assert assert_same(Stack(kind), batch()) == 0


class Skips(Stack):
    """As a U-Net: what the first half makes is read by the second, in reverse."""

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.blocks):
            if index >= len(self.blocks) // 2:
                x = x + 0.5 * kept.pop()
            x = block(x)
            if index < len(self.blocks) // 2:
                kept.append(x)
        return x


class ByPlace(Stack):
    """Between the blocks something happens that depends on the index, past the blocks that are traced."""

    def run(self, x: Tensor) -> Tensor:
        total = x
        for index, block in enumerate(self.blocks):
            x = block(x) * (2.0 if index == 5 else 1.0)
            if index % 3 == 1:
                total = total + x
        return total


class Backwards(Stack):
    def run(self, x: Tensor) -> Tensor:
        for index in (3, 1, 0, 2, 7, 5, 4, 6):
            x = self.blocks[index](x)
        return x


class LeavesOut(Stack):
    """Blocks that are not called have parameters that are not used."""

    def run(self, x: Tensor) -> Tensor:
        for block in [*self.blocks][::2]:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("stack", "folds"),
    [
        (Skips, 4),
        pytest.param(ByPlace, 4, marks=pytest.mark.wide),
        pytest.param(Backwards, 4, marks=pytest.mark.wide),
        pytest.param(LeavesOut, 1, marks=pytest.mark.wide),
    ],
)
def test_what_happens_between_blocks_is_traced_at_every_place(stack: type[Stack], folds: int) -> None:
    assert assert_same(stack(), batch()) == folds


class Twice(Stack):
    def run(self, x: Tensor) -> Tensor:
        return super().run(super().run(x))


class Reaches(Stack):
    """Blocks read a tensor that they are not given."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.index = x.sum()  # type: ignore[assignment]
            x = block(x)
        return x


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.index


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x))


class Remembers(Block):
    memory: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.memory = super().forward(x)
        return self.memory


def test_a_block_that_writes_into_its_input_is_traced_whole() -> None:
    assert assert_same(Stack(Writing), batch()) == 0


@pytest.mark.wide
def test_what_cannot_be_shown_is_traced_whole() -> None:
    assert assert_same(Twice(), batch()) == 0
    assert assert_same(Stack(Remembers), batch()) == 0


@pytest.mark.wide
def test_a_tensor_that_reaches_a_block_by_an_attribute_is_seen() -> None:
    model = Reaches(Reading)
    assert rows(capture(model, batch())) == rows(capture_folded(model, batch()))


class Flag:
    raised = False


class Told(Block):
    """Reads a flag that the model raises between two calls."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.flag = Flag()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if self.flag.raised else x)


class Tells(Stack):
    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.flag.raised = index == 4
            x = block(x)
        return x


class Looks(Stack):
    """Reads a part of a block that is not traced; a default hides that it is not there."""

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return x if getattr(self.blocks[4], "linear", None) is None else -x


class Unwatched(Stack):
    """One block of the middle without gradients."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index != 4):
                x = block(x) + x
        return x


def test_blocks_that_are_told_by_attributes_are_traced_whole_and_what_is_looked_into_is_there() -> None:
    told = Tells(Told)
    for block in told.blocks:
        block.flag = told.blocks[0].flag
    assert assert_same(told, batch()) == 0
    assert assert_same(Looks(), batch()) == 4


@pytest.mark.wide
def test_a_block_without_gradients_is_traced() -> None:
    """Block 4 is its own; 0 and 5 have inputs without gradients, and 6 is as 5; 1, 2 and 7 with, and 3 is alike."""
    assert assert_same(Unwatched(), batch()) == 2


class Halved(Stack):
    """The last four blocks see another shape: another kind of call, with two examples of its own."""

    def run(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 4:
                x = x[:, ::2]
            x = block(x)
        return x.repeat_interleave(2, dim=1)


@pytest.mark.wide
def test_calls_with_other_shapes_are_another_kind() -> None:
    assert assert_same(Halved(), batch()) == 1


@pytest.mark.wide
def test_attributes_tell_blocks_apart() -> None:
    """Dropout rates that grow with depth, as in vision transformers: every block its own kind."""
    model = Stack()
    for index, block in enumerate(model.blocks):
        block.rate = index / 8
    assert assert_same(model, batch()) == 0
    model = Stack()
    for block in list(model.blocks)[4:]:
        block.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
    assert assert_same(model, batch()) == 1 + 1


@pytest.mark.wide
def test_shared_weights_rule_blocks_out() -> None:
    model = Stack()
    for block in model.blocks:
        block.linear = model.blocks[0].linear
    assert assert_same(model, batch()) == 0


@pytest.mark.wide
def test_frozen_blocks_are_another_kind() -> None:
    model = Stack()
    for block in list(model.blocks)[:4]:
        block.requires_grad_(False)
    assert assert_same(model, batch()) == 2


@pytest.mark.wide
def test_batch_statistics_are_kept_block_by_block() -> None:
    class Normed(Block):
        def __init__(self, index: int = 0) -> None:
            super().__init__(index)
            self.batch = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.batch(super().forward(x))

    assert assert_same(Stack(Normed), batch()) == 4

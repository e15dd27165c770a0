"""What a forward assigns to a buffer is kept as a change in place is; parameters are the optimizer's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import autoplan
from autoplan.capture import capture
from autoplan.errors import CaptureError, StrategyError
from tests.support.captures import line_of

ALONE = {"data": 1, "tensor": 1, "pipeline": 1}


class Base(nn.Module):
    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x), x).square().mean()

    def change(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class Assigns(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return y * self.steps


class Registers(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self.register_buffer("steps", self.steps + 1)
        return y * self.steps


class WritesTheTable(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self._buffers["steps"] = self.steps + 1
        return y * self.steps


class Averages(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        before = self.mean
        self.mean = 0.9 * before + 0.1 * y.detach().mean(0)  # averages
        return y - self.mean + before


class WritesOut(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        torch.add(self.steps, 1, out=self.steps)
        return y * self.steps


class Normalised(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(self.linear)


class NormalisedByAHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(self.linear)


class Teaches(Base):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4)

    def change(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.inference_mode():
            wanted = self.teacher(x)
        return y - wanted.clone()


class Follows(Teaches):
    """A frozen teacher that follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_(False)

    def change(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
        return y - self.teacher(x)


class StraightThrough(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        return y + (y.round() - y).data


KEPT = [Assigns, Registers, WritesTheTable, Averages, WritesOut, Normalised, NormalisedByAHook, Teaches, Follows]


@pytest.mark.parametrize("model", [*KEPT, StraightThrough])
def test_steps_are_the_models_own(model: type[Base]) -> None:
    torch.manual_seed(0)
    alone = model()
    program = autoplan.compile(
        copy.deepcopy(alone), gpus=1, example_inputs=torch.randn(8, 4), strategy=ALONE, device="cpu"
    )
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (program, alone))
    for _ in range(4):
        batch = torch.randn(8, 4)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss = alone(batch)
        loss.backward()
        assert program.step(batch) == pytest.approx(loss.item(), rel=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
    state = program.state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("model", [Assigns, Averages, WritesOut, Normalised, NormalisedByAHook])
def test_a_buffer_is_changed_once_a_batch_not_once_a_part(model: type[Base]) -> None:
    with pytest.raises(StrategyError, match=r"is changed once a forward|would change the numbers"):
        autoplan.compile(
            model(),
            gpus=1,
            example_inputs=torch.randn(8, 4),
            strategy={**ALONE, "micro_batch_size": 2},
            device="cpu",
        )


def test_its_line_is_where_the_value_is_made() -> None:
    found = capture(Averages(), torch.randn(8, 4)).couplings
    assert found and all(coupling.where.startswith(line_of(__file__, "averages")) for coupling in found)


def test_a_class_that_was_typed_in_a_notebook_is_no_other() -> None:
    typed: dict[str, Any] = {"nn": nn, "torch": torch, "__name__": "__main__"}
    text = """class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
    def forward(self, x):
        self.steps = self.steps + 1
        return (self.linear(x) * self.steps).square().mean()
"""
    exec(compile(text, "<cell 1>", "exec"), typed)
    graph = capture(typed["Typed"](), torch.randn(8, 4)).graph_module.graph
    assert any(str(node.target) == "aten.copy_.default" for node in graph.nodes)


def test_gradients_scaled_by_frequency_see_the_whole_batch() -> None:
    class Counts(Base):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4, scale_grad_by_freq=True)

        def change(self, y: Tensor, x: Tensor) -> Tensor:
            return y + self.table(x[:, 0].abs().long().clamp(0, 4))

    (coupling,) = capture(Counts(), torch.randn(8, 4)).couplings
    assert coupling.operator == "embedding" and "how often an index comes" in coupling.reason


class Grows(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self.steps = torch.cat([self.steps.reshape(-1), torch.ones(1)])
        return y


class KeepsAGradient(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self.mean = y.mean(0)
        return y - self.mean


class ReplacesAParameter(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        self.linear.weight = nn.Parameter(self.linear.weight * 0.9)
        return y


class ClampsAParameter(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-1, 1)  # clamps a parameter
        return self.linear(y)


class ShrinksAParameter(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight *= 0.9  # shrinks a parameter
        return self.linear(y)


class ZeroesARow(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight[0].zero_()  # zeroes a row
        return self.linear(y)


class KeepsItsFirstBatch(Base):
    def change(self, y: Tensor, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.mean(0))  # keeps its first batch
        return y - self.first


class KeepsItsFirstBatchAsAnAttribute(Base):
    kept: Tensor | None = None

    def change(self, y: Tensor, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.mean(0)  # an attribute
        return y - self.kept


@pytest.mark.parametrize(
    ("model", "line", "what"),
    [
        (Grows, "", "the buffer steps of float32 [] to one of float32 [2]"),
        (KeepsAGradient, "", "the buffer mean to a value with a gradient"),
        (ReplacesAParameter, "", "replaces the parameter linear.weight"),
        (ClampsAParameter, "clamps a parameter", "the parameter linear.weight in place"),
        (ShrinksAParameter, "shrinks a parameter", "the parameter linear.weight in place"),
        (ZeroesARow, "zeroes a row", "the parameter linear.weight in place"),
        (KeepsItsFirstBatch, "keeps its first batch", "self.first"),
        (KeepsItsFirstBatchAsAnAttribute, "an attribute", "self.kept"),
    ],
)
def test_what_cannot_be_kept_is_refused(model: type[Base], line: str, what: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(model(), torch.randn(8, 4))
    assert what in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, line) if line else __file__)


def test_a_table_of_positions_that_is_built_once_is_no_state() -> None:
    class Builds(Base):
        def change(self, y: Tensor, x: Tensor) -> Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(y.shape[1]) * 0.1, persistent=False)
                self.mask = torch.ones_like(x).triu()
            return y - self.table * self.mask

    assert any("a side effect" in note for note in capture(Builds(), torch.randn(8, 4)).notes)

"""Attributes that a forward changes: what the next call would read is refused, at its line; other side effects are
left out of the program, and said."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture, capture_folded
from autoplan.errors import CaptureError


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.hidden: Tensor | None = None
        self.past: list[Tensor] = []
        self.mask: Tensor | None = None
        self.fresh = True
        self.scale = 1.0


class Scales(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) * self.calls).sum()


class Recurs(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.hidden is not None:
            y = y + self.hidden
        self.hidden = y.detach()
        return y.sum()


class Remembers(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.past:
            y = y + self.past[-1]
        self.past.append(y.detach())
        return y.sum()


class StartsOtherwise(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.fresh:
            y = y * 2
            self.fresh = False
        return y.sum()


class Counts(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sum()


class Logs(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.past.append(y.detach())
        return y.sum()


class KeepsAMask(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(8, 8))
        return (self.linear(x) @ self.mask).sum()


class KeepsALiteral(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.tensor([0.0, 1.0] * 4)
        return (self.linear(x) * self.mask).sum()


class HandsOn(Stateful):
    """Its operators return the input and the weight themselves."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = F.linear(F.dropout(x.contiguous(), training=False).to(x.dtype), self.linear.weight.contiguous())
        return F.mse_loss(y, x)


class SetsAnew(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.5
        return (self.linear(x) * self.scale).sum()


class Inside(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[0](x)


READ = [(Scales, "calls"), (Recurs, "hidden"), (Remembers, "past"), (StartsOtherwise, "fresh")]
LEFT_OUT = [
    (Counts, "calls"),
    (HandsOn, "calls"),
    (Logs, "past"),
    (KeepsAMask, "mask"),
    (KeepsALiteral, "mask"),
    (SetsAnew, "scale"),
]


@pytest.mark.parametrize("trace", [capture, capture_folded])
@pytest.mark.parametrize(("kind", "name"), READ)
def test_what_the_next_call_reads_is_refused_at_its_line(trace: type, kind: type[Stateful], name: str) -> None:
    model = kind()
    before = dict(vars(model))
    with pytest.raises(CaptureError) as refused:
        trace(model, torch.randn(4, 8))
    assert f"forward changes self.{name}, and the next call computes something else" in refused.value.what
    assert f"{__file__}:" in (refused.value.where or "")
    line = int(refused.value.where.split(":")[1].split()[0])
    with open(__file__, encoding="utf-8") as file:
        assert f"self.{name}" in file.readlines()[line - 1]
    assert vars(model) == before


@pytest.mark.parametrize("trace", [capture, capture_folded])
@pytest.mark.parametrize(("kind", "name"), LEFT_OUT)
def test_what_no_later_call_reads_is_left_out_and_said(trace: type, kind: type[Stateful], name: str) -> None:
    notes = trace(kind(), torch.randn(4, 8)).notes
    assert notes == (f"forward changes self.{name}: a side effect that the captured program does not have",)


def test_attributes_of_modules_inside_are_named_by_their_path() -> None:
    with pytest.raises(CaptureError, match=r"self\.blocks\.0\.hidden"):
        capture(Inside(Recurs()), torch.randn(4, 8))
    capture(Inside(Counts()), torch.randn(4, 8))

"""What the numeric check makes of models that are not like the others: draws, autocast, outputs and buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.verification import VerifyReport
from autoplan.verification.text import report_text
from tests.support.captures import line_of


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Noisy(nn.Module):
    """Adds noise of its own, or does not."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.first, self.second, self.noise = nn.Linear(8, 16), nn.Linear(16, 4), noise

    def forward(self, x: Tensor, y: Tensor) -> Output:
        hidden = torch.relu(self.first(x))
        if self.noise:
            hidden = hidden + self.noise * torch.randn_like(hidden)  # draws
        logits = self.second(hidden)
        return Output(F.cross_entropy(logits, y), logits)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # casts
            logits = self.second(torch.relu(self.first(x)))
        return F.cross_entropy(logits.float(), y)


def report(model: nn.Module, **strategy: Any) -> VerifyReport:
    batch = {"x": torch.randn(8, 8), "y": torch.randint(0, 4, (8,))}
    plan = autoplan.plan(model, gpus="2xcpu", example_inputs=batch, strategy=strategy)
    return autoplan.verify(model, plan, batch)


def test_a_dataclass_is_an_output_like_others() -> None:
    assert report(Noisy(0.0), pipeline=2).equal


def test_a_model_that_draws_is_not_called_different_but_not_comparable_at_its_line() -> None:
    found = report(Noisy(0.1), pipeline=2)
    assert found.numeric.status == "not executable here" and found.exit_code == 1
    assert "two runs of the single process differ" in found.numeric.reason
    assert line_of(__file__, "draws") in found.numeric.reason
    assert "not shown to be equal" in report_text(found)


def test_autocast_casts_nothing_in_float64_and_the_report_says_so() -> None:
    found = report(Cast(), tensor=2)
    assert found.equal
    said = [text for text in found.numeric.reductions if text.startswith("autocast to bfloat16")]
    assert len(said) == 1 and line_of(__file__, "casts") in said[0] and "casts nothing in float64" in said[0]

"""What may be handed to verify, and what it runs: plan files, dropout, one micro-batch, custom operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture
from autoplan.errors import CaptureError, PlanFileError
from autoplan.plan import Plan
from tests.support.captures import line_of


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).square().mean()

    def between(self, y: Tensor) -> Tensor:
        return torch.tanh(y)


class Drops(Two):
    """At rates that no module and no attribute holds."""

    def between(self, y: Tensor) -> Tensor:
        y = F.dropout(torch.dropout(y, 0.1, True), training=self.training)
        return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=0.2)[:, 0]


def planned(model: nn.Module, x: Tensor, **degrees: Any) -> Plan:
    return autoplan.plan(model, gpus="2xcpu", example_inputs=x, global_batch=8, strategy=degrees)


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def test_a_plan_may_be_the_path_of_its_file(tmp_path: Path) -> None:
    model = Two()
    path = tmp_path / "plan.json"
    planned(model, X, data=2, micro_batch_size=4).save(path)
    for plan in (path, str(path)):
        assert autoplan.verify(model, plan, X, static=True).equal
    with pytest.raises(PlanFileError, match="No such file"):
        autoplan.verify(model, tmp_path / "other.json", X)


@pytest.mark.parametrize("plan", [None, 3, {"data": 2}])
def test_what_is_no_plan_is_refused_in_one_message(plan: Any) -> None:
    with pytest.raises(PlanFileError, match=f"the plan is a {type(plan).__name__}, not a Plan") as refused:
        autoplan.verify(Two(), plan, X)
    assert "the path of a plan file" in refused.value.legal


def test_dropout_whose_rate_stands_in_the_forward_is_off_on_both_sides() -> None:
    model = Drops()
    report = autoplan.verify(model, planned(model, X, data=2, micro_batch_size=2), X)
    assert report.equal, report.numeric.reason
    assert model.training


def test_a_plan_of_one_micro_batch_is_run_with_several_and_that_is_said() -> None:
    model = Two()
    numeric = autoplan.verify(model, planned(model, X, data=2, micro_batch_size=4), X).numeric
    assert numeric.status == "equal"
    assert numeric.strategy is not None and numeric.strategy.micro_batches == 2
    assert any("more micro-batches than planned" in sentence for sentence in numeric.reductions)


class Normalised(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def between(self, y: Tensor) -> Tensor:
        return self.norm(y)


def test_a_model_whose_batch_must_stay_whole_is_run_with_one() -> None:
    model = Normalised()
    numeric = autoplan.verify(model, planned(model, X, pipeline=2, micro_batch_size=8), X).numeric
    assert numeric.status == "equal"
    assert numeric.strategy is not None and numeric.strategy.micro_batches == 1


class Uncopied(Two):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (number for number in range(3))


def test_a_model_that_cannot_be_copied_is_said_to_be_so() -> None:
    model = Uncopied()
    numeric = autoplan.verify(model, planned(model, X, data=2, micro_batch_size=4), X).numeric
    assert numeric.status == "not executable here"
    assert "cannot be copied: TypeError" in numeric.reason


@torch.library.custom_op("autoplan_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class WithoutFormula(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = tripled(self.first(x))  # no formula
        return self.second(y).square().mean()


class Detached(Two):
    def between(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = tripled(y)
        return y * scale


def test_a_custom_operator_without_a_backward_is_refused_where_a_gradient_has_to_pass() -> None:
    with pytest.raises(CaptureError, match="autoplan_tests::tripled has no autograd formula") as refused:
        capture(WithoutFormula(), X)
    assert refused.value.where.startswith(line_of(__file__, "no formula"))
    assert any("tripled" in str(node.target) for node in capture(Detached(), X).graph_module.graph.nodes)

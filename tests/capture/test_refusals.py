"""What cannot be captured is refused at the user's file and line, with what to do instead."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture, capture_folded
from autoplan.errors import CaptureError
from tests.support.captures import Round, line_of
from tests.support.models import mlp, nano_gpt


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class BranchesOnValues(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:  # branch on a value
            y = -y
        return y.mean()


class ComparesItem(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        limit = y.max().item()
        if limit > 1:  # branch on an item
            y = y / limit
        return y.mean()


class LoopsOnValues(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for _ in range(int(x.abs().sum())):  # loop on a value
            y = y + 1
        return y.mean()


class LeavesTorch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() * float(x.numpy().max())  # numpy


class ExpertsByNumel(Base):
    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        if chosen.numel() == 0:  # empty selection
            return self.layer(x).mean()
        return self.layer(chosen).mean()


class StraightThrough(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Round.apply(self.layer(x)).mean()  # custom function


class Broken(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten()).mean()  # shapes do not fit


@pytest.mark.parametrize(
    ("model", "marker", "what", "mend"),
    [
        (BranchesOnValues, "branch on a value", "control flow depends on a tensor's values", "torch.where"),
        (ComparesItem, "branch on an item", "control flow depends on a tensor's values", "torch.where"),
        (
            LoopsOnValues,
            "loop on a value",
            "control flow depends on a tensor's values",
            "fixed when the model is built",
        ),
        (LeavesTorch, "numpy", "control flow depends on a tensor's values", "stay in torch"),
        (ExpertsByNumel, "empty selection", "control flow depends on a tensor's values", "torch.where"),
        (StraightThrough, "custom function", "Round is an autograd.Function", "custom_op"),
        (Broken, "shapes do not fit", "cannot trace this model: RuntimeError", "in plain Python first"),
    ],
)
def test_the_users_line_is_named(
    model: Callable[[], nn.Module], marker: str, what: str, mend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as error:
        capture(model(), torch.randn(6, 4))
    assert what in error.value.what
    assert error.value.where.startswith(line_of(__file__, marker) + " in forward")
    assert mend in error.value.attempt
    assert error.value.legal
    output = capfd.readouterr()
    assert output.err == "" and output.out == ""


class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.owned = nn.Linear(4, 4)
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.owned(x)
        return self.hidden[0](y).mean()  # module in a list


def test_parameters_that_the_model_does_not_own_would_lose_their_gradient() -> None:
    with pytest.raises(CaptureError) as error:
        capture(PlainList(), torch.randn(6, 4))
    assert error.value.where.startswith(line_of(__file__, "module in a list"))
    assert "nn.ModuleList" in error.value.attempt
    model, free = Base(), nn.Parameter(torch.randn(4))

    def penalised(output: Tensor, factor: Tensor = free) -> Tensor:
        return output.mean() + factor.norm()  # a parameter outside

    with pytest.raises(CaptureError) as error:
        capture(model.layer, torch.randn(6, 4), loss_fn=penalised)
    assert error.value.where.startswith(line_of(__file__, "a parameter outside"))
    fixed = capture(model.layer, torch.randn(6, 4), loss_fn=lambda y: y.mean() + model.layer.weight.norm())
    fixed.graph_module(torch.zeros(6, 4)).backward()
    assert model.layer.weight.grad.norm() > 0


def loop_helper(y: Tensor) -> Tensor:
    while y.sum() > 1:  # while in a helper
        y = y / 2
    return y


def test_the_line_in_a_helper_is_named_not_forwards() -> None:
    class UsesHelper(Base):
        def forward(self, x: Tensor) -> Tensor:
            return loop_helper(self.layer(x)).mean()

    with pytest.raises(CaptureError) as error:
        capture(UsesHelper(), torch.randn(6, 4))
    assert error.value.where.startswith(line_of(__file__, "while in a helper") + " in loop_helper")


class NoLoss(Base):
    def forward(self, x: Tensor) -> Any:  # returns no loss
        return self.output(self.layer(x))

    def output(self, y: Tensor) -> Any:
        return y


class Two(NoLoss):
    def output(self, y: Tensor) -> Any:
        return y.mean(), y.sum(), y


class Logits(NoLoss):
    def output(self, y: Tensor) -> Any:
        return {"logits": y}


class Nothing(NoLoss):
    def output(self, y: Tensor) -> Any:
        return None


class Whole(NoLoss):
    def output(self, y: Tensor) -> Any:
        return y.argmax()


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (NoLoss, "a tensor of shape [batch, 4]"),
        (Two, "a tuple that holds 2 scalars"),
        (Logits, "a dict with logits without a loss"),
        (Nothing, "None, which holds no loss"),
        (Whole, "torch.int64, not a scalar loss"),
    ],
)
def test_a_model_without_a_loss_is_refused_at_its_forward(model: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(model(), torch.randn(6, 4))
    assert what in error.value.what
    assert error.value.where.startswith(line_of(__file__, "returns no loss"))
    assert "loss_fn=" in error.value.attempt


def test_a_hugging_face_model_without_labels_is_told_to_pass_them() -> None:
    from tests.support.models import tiny_gpt2

    model, batch = tiny_gpt2(layers=1)
    with pytest.raises(CaptureError) as error:
        capture(model, {"input_ids": batch["input_ids"]})
    assert "labels" in error.value.attempt
    assert "modeling_gpt2.py" in error.value.where


def per_sample(output: Tensor, target: Tensor) -> Tensor:  # loss per sample
    return F.cross_entropy(output, target, reduction="none")


def test_a_loss_fn_that_returns_no_scalar_is_refused_at_its_line() -> None:
    with pytest.raises(CaptureError) as error:
        capture(nn.Linear(4, 3), (torch.randn(6, 4), torch.zeros(6, dtype=torch.long)), loss_fn=per_sample)
    assert "loss_fn returns a tensor of shape [batch]" in error.value.what
    assert error.value.where.startswith(line_of(__file__, "loss per sample"))
    assert ".mean()" in error.value.attempt


class TwoInputs(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # two inputs
        return F.mse_loss(self.layer(x), y)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"x": torch.randn(6, 4)}, "missing a required argument: 'y'"),
        ((torch.randn(6, 4),), "missing a required argument: 'y'"),
        (torch.randn(6, 4), "missing a required argument: 'y'"),
        ((torch.randn(6, 4),) * 3, "too many positional arguments"),
        ({"x": torch.randn(6, 4), "y": torch.randn(6, 4), "z": torch.randn(6)}, "forward does not take z"),
    ],
)
def test_inputs_that_do_not_fit_forward_are_refused_at_it(inputs: Any, what: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(TwoInputs(), inputs)
    assert what in error.value.what
    assert error.value.where.startswith(line_of(__file__, "two inputs"))
    assert "x" in error.value.legal and "y" in error.value.legal


@pytest.mark.parametrize(
    ("inputs", "what", "where"),
    [
        ({"x": "text", "y": None}, "hold no tensor", "example_inputs"),
        ((), "hold no tensor", "example_inputs"),
        ({"x": torch.randn(6, 4).numpy(), "y": torch.randn(6, 4)}, "numpy.ndarray", "example_inputs['x']"),
        ({0: torch.randn(6, 4)}, "the key 0", "example_inputs"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "only scalars", "example_inputs"),
        ((torch.zeros(0, 4), torch.zeros(0, 4)), "empty batch", "example_inputs"),
    ],
)
def test_what_is_no_batch_is_refused(inputs: Any, what: str, where: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(TwoInputs(), inputs)
    assert what in error.value.what
    assert error.value.where == where
    assert error.value.attempt


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"not an nn\.Module"):
        capture(nn.Linear, torch.randn(6, 4))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="a lazy module"):
        capture(nn.LazyLinear(4), torch.randn(6, 4))
    with pytest.raises(CaptureError) as error:
        capture(nn.DataParallel(mlp()[0]), mlp()[1])
    assert "model.module" in error.value.attempt


class Leaky(nn.Module):
    """Everything a forward may do to its module, and then a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.history: list[Any] = []
        self.last: Any = None
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.layer(x))
        self.last = y
        self.history.append(y)
        self.count += y.detach().mean(0)
        self.register_buffer("extra", y.detach())
        self.layer.training = False
        if self.fails and y.sum() > 0:
            return y.sum()
        return y.mean()


@pytest.mark.parametrize("fails", [True, False])
def test_model_and_random_state_are_as_before_even_after_a_failure(fails: bool) -> None:
    model = Leaky()
    model.fails = fails
    tensors = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    result = None
    try:
        result = capture(model, torch.ones(6, 4))
    except CaptureError:
        assert fails
    assert (result is None) is fails
    assert torch.equal(torch.get_rng_state(), state)
    assert model.history == [] and model.last is None
    assert model.layer.training and model.training
    after = model.state_dict(keep_vars=True)
    assert after.keys() == tensors.keys()
    for name, tensor in after.items():
        assert id(tensor) == tensors[name][0]
        assert torch.equal(tensor, tensors[name][1])
    if result is not None:
        told = " ".join(result.notes)
        assert "self.last:" in told and "self.history:" in told and "self.layer.training:" in told


def test_a_failed_capture_leaves_the_process_able_to_capture() -> None:
    with pytest.raises(CaptureError):
        capture(BranchesOnValues(), torch.randn(6, 4))
    assert torch.autograd.Function.apply.__qualname__ == "Function.apply"
    model, batch = nano_gpt(layers=1)
    assert capture(model, batch).dynamic_batch


def by_python(x: Tensor) -> Tensor:
    return x * random.random()  # Python draws


def by_choice(x: Tensor) -> Tensor:
    return x * random.choice([1.0, 2.0, 3.0])  # Python chooses


def by_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # NumPy draws


class Draws(Base):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.layer(x)).square().mean()


@pytest.mark.parametrize("take", [capture, capture_folded])
@pytest.mark.parametrize(
    ("draw", "marker"), [(by_python, "Python draws"), (by_choice, "Python chooses"), (by_numpy, "NumPy draws")]
)
def test_random_numbers_that_are_not_torchs_would_be_frozen(take: Any, draw: Any, marker: str) -> None:
    with pytest.raises(CaptureError, match="one draw for ever") as error:
        take(Draws(draw), torch.randn(6, 4))
    assert error.value.where.startswith(line_of(__file__, marker))
    assert "torch.rand" in error.value.attempt


def test_random_numbers_of_torch_are_kept_and_draws_outside_of_forward_are_not_counted() -> None:
    kept = capture(Draws(lambda x: x * torch.rand(())), torch.randn(6, 4))
    assert any("rand" in str(node.target) for node in kept.graph_module.graph.nodes)
    random.random(), np.random.rand()
    capture(Draws(torch.tanh), torch.randn(6, 4))

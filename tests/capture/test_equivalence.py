"""Plain models: the captured graph computes the eager model's loss and every gradient, at any batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture, gather_inputs
from tests.support.captures import captured, eager, first_samples, largest_difference, to_float64
from tests.support.models import batch_norm_cnn, mlp, nano_gpt, small_cnn

TOLERANCE = 1e-12


@pytest.mark.parametrize("build", [nano_gpt, small_cnn, batch_norm_cnn, mlp], ids=lambda build: build.__name__)
def test_loss_and_gradients_at_the_example_batch_and_others(build: Any) -> None:
    model, batch = build()
    model, batch = model.double(), to_float64(batch)
    result = capture(model, batch)
    assert result.dynamic_batch and result.batch_size == 8 and result.dtype == torch.float64
    for samples in (8, 5, 1):
        part = first_samples(batch, samples)
        assert largest_difference(captured(result, model, part), eager(model, part)) <= TOLERANCE


def test_an_example_of_one_sample_runs_at_other_sizes() -> None:
    model, batch = nano_gpt()
    model = model.double()
    result = capture(model, first_samples(batch, 1))
    assert result.dynamic_batch and result.batch_size == 1
    assert result.inputs[0].shape == (1, 16)
    for samples in (1, 8):
        part = first_samples(batch, samples)
        assert largest_difference(captured(result, model, part), eager(model, part)) <= TOLERANCE


def test_running_statistics_move_as_the_eager_model_moves_them() -> None:
    model, batch = batch_norm_cnn()
    result = capture(model, batch)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(**batch)
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    result.graph_module(*gather_inputs(result, batch))
    assert expected["norm.num_batches_tracked"] == 1
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_dropout_draws_the_same_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    batch = (torch.randn(6, 8),)
    result = capture(model, batch, loss_fn=lambda y: y.mean())
    torch.manual_seed(3)
    expected = model(*batch).mean()
    torch.manual_seed(3)
    assert torch.equal(result.graph_module(*batch), expected)
    evaluated = capture(model.eval(), batch, loss_fn=lambda y: y.mean())
    assert not model.training
    assert torch.equal(evaluated.graph_module(*batch), model(*batch).mean())


class Nested(nn.Module):
    """Lists, dicts, tuples and settings in; a dict with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4, bias=False)

    def forward(self, parts: dict[str, list[Tensor]], *, target: Tensor, scale: float = 1.0, mask: Any = None) -> Any:
        first, second = parts["views"]
        y = self.one(first) + self.two(second) * scale
        return {"loss": F.mse_loss(y, target), "prediction": y}


def test_nested_batches_and_settings() -> None:
    torch.manual_seed(0)
    model = Nested().double()
    batch = to_float64(
        {
            "parts": {"views": [torch.randn(6, 4), torch.randn(6, 4)]},
            "target": torch.randn(6, 4),
            "scale": 0.5,
            "mask": None,
        }
    )
    result = capture(model, batch)
    assert [spec.path for spec in result.inputs] == [("parts", "views", 0), ("parts", "views", 1), ("target",)]
    assert [spec.placeholder for spec in result.inputs] == ["parts_views_0", "parts_views_1", "target"]
    assert result.constants == ((("scale",), 0.5), (("mask",), None))
    for samples in (6, 2):
        part = first_samples(batch, samples)
        assert largest_difference(captured(result, model, part), eager(model, part)) <= TOLERANCE


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Returns(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        loss = y.square().mean()
        return {
            "scalar": loss,
            "tuple": (y, loss, None),
            "list": [loss, y],
            "dict": {"logits": y, "loss": loss},
            "object": Output(loss=loss, logits=y),
        }[self.form]


@pytest.mark.parametrize("form", ["scalar", "tuple", "list", "dict", "object"])
def test_the_loss_is_found_in_whatever_forward_returns(form: str) -> None:
    model, batch = Returns(form), torch.randn(6, 4)
    result = capture(model, batch)
    assert torch.equal(result.graph_module(batch), model.layer(batch).square().mean())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Weighted(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()) * 2)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target, weight=self.weight)


X, TARGET = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("batch", "loss_fn"),
    [
        ((X, TARGET), F.cross_entropy),
        ([X, TARGET], nn.CrossEntropyLoss()),
        ({"x": X, "target": TARGET}, F.cross_entropy),
        ({"x": X, "labels": TARGET}, F.cross_entropy),
        ({"x": X, "labels": TARGET}, lambda output, labels: F.cross_entropy(output, labels)),
        ({"x": X, "labels": TARGET, "smoothing": 0.0}, lambda y, labels, smoothing=0.0: F.cross_entropy(y, labels)),
        ((X, TARGET), lambda y, t: {"loss": F.cross_entropy(y, t)}),
    ],
    ids=["tuple", "list and module", "dict by name", "dict in order", "dict lambda", "dict with default", "dict loss"],
)
def test_loss_fn_takes_what_forward_does_not(batch: Any, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = Classifier()
    result = capture(model, batch, loss_fn=loss_fn)
    for samples in (6, 4):
        loss = result.graph_module(*gather_inputs(result, first_samples(batch, samples)))
        assert torch.equal(loss, F.cross_entropy(model(X[:samples]), TARGET[:samples]))


def test_loss_fn_of_the_output_alone() -> None:
    model = Classifier()
    assert torch.equal(capture(model, X, loss_fn=torch.mean).graph_module(X), model(X).mean())


def test_a_loss_module_brings_its_parameters_under_its_own_name() -> None:
    model, loss_fn = Classifier().double(), Weighted().double()
    batch = (X.double(), TARGET)
    result = capture(model, batch, loss_fn=loss_fn)
    names = dict(result.graph_module.named_parameters())
    assert list(names) == ["layer.weight", "layer.bias", "loss_fn.temperature"]
    assert names["loss_fn.temperature"] is loss_fn.temperature
    assert dict(result.graph_module.named_buffers())["loss_fn.weight"] is loss_fn.weight
    result.graph_module(*batch).backward()
    gradients = [loss_fn.temperature.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    loss_fn.zero_grad()
    loss_fn(model(batch[0]), TARGET).backward()
    for gradient, parameter in zip(gradients, [loss_fn.temperature, *model.parameters()], strict=True):
        assert (gradient - parameter.grad).norm() <= TOLERANCE * parameter.grad.norm()


class Blocks(nn.Module):
    """no_grad with a teacher and a moving average in place, enable_grad, autocast that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            target = self.shared(y).softmax(-1)
            self.average.mul_(0.9).add_(target.mean(0), alpha=0.1)
        with torch.autocast("cpu", enabled=False):
            z = self.shared(y)
        with torch.enable_grad():
            z = z + 1
        return F.mse_loss(z, target) + self.average.sum() * 0


def test_blocks_without_gradients_are_put_in_line_exactly() -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    batch = (X.double(),)
    result = capture(model, batch)
    assert not any(isinstance(module, torch.fx.GraphModule) for module in list(result.graph_module.modules())[1:])
    ours = captured(result, model, batch)
    average = model.average.clone()
    model.average.zero_()
    theirs = eager(model, batch)
    assert largest_difference(ours, theirs) <= TOLERANCE
    assert torch.equal(average, model.average)
    assert average.norm() > 0

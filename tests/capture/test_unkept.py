"""What a trace of the forward does not see, and a forward's own ``try`` would hide, is refused at the user's line."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from autoplan.capture import capture
from autoplan.errors import CaptureError
from tests.support.captures import Round, line_of


def double(*gradients: Any) -> Any:  # the hook
    return tuple(2 * g for g in gradients[-1]) if isinstance(gradients[-1], tuple) else 2 * gradients[-1]


class Base(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.generator = torch.Generator().manual_seed(0)
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x)).square().mean()

    def change(self, y: Tensor) -> Tensor:
        return y


class HooksATensor(Base):
    def change(self, y: Tensor) -> Tensor:
        y.register_hook(double)  # hooks a tensor
        return y


class HooksANode(Base):
    def change(self, y: Tensor) -> Tensor:
        y.grad_fn.register_hook(double)  # hooks a node
        return y


class HooksMany(Base):
    def change(self, y: Tensor) -> Tensor:
        torch.autograd.graph.register_multi_grad_hook([y], double)  # hooks many
        return y


class HooksSaved(Base):
    def change(self, y: Tensor) -> Tensor:
        with saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):  # hooks what is saved
            return torch.tanh(y)


class ChangesData(Base):
    def change(self, y: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.5)  # changes data
        return y


class SetsData(Base):
    def change(self, y: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.5  # sets data
        return y


class Freezes(Base):
    def change(self, y: Tensor) -> Tensor:
        self.linear.weight.requires_grad_(False)  # freezes
        return y


class Differentiates(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        y = self.linear(x).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)  # differentiates
        return y + gradient.norm()


class OwnGenerator(Base):
    def change(self, y: Tensor) -> Tensor:
        return y * torch.rand(4, generator=self.generator)  # a generator of its own


class ChangesATensor(Base):
    def change(self, y: Tensor) -> Tensor:
        self.plain += 1  # a tensor that is no buffer
        return y * self.plain


rounded = Round.apply


class CallsAnAlias(Base):
    def change(self, y: Tensor) -> Tensor:
        return rounded(y)  # an alias of apply


class CallsAPartial(Base):
    def __init__(self) -> None:
        super().__init__()
        self.round = functools.partial(Round.apply)

    def change(self, y: Tensor) -> Tensor:
        return self.round(y)  # a partial of apply


class Seeds(Base):
    def change(self, y: Tensor) -> Tensor:
        torch.manual_seed(0)  # seeds
        return y + torch.rand_like(y)


class Forks(Base):
    def change(self, y: Tensor) -> Tensor:
        with torch.random.fork_rng():  # forks
            return y + torch.rand_like(y)


class PutsBack(Base):
    def change(self, y: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = y + torch.rand_like(y)
        torch.set_rng_state(state)  # puts back
        return y


class SeedsTheGenerator(Base):
    def change(self, y: Tensor) -> Tensor:
        torch.default_generator.manual_seed(1)  # seeds the generator
        return y + torch.rand_like(y)


class Maps(Base):
    def change(self, y: Tensor) -> Tensor:
        return torch.vmap(self.linear)(y)  # maps


class TakesAGradientOfAFunction(Base):
    def change(self, y: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.linear(x).sum())(y)  # a gradient of a function


@pytest.mark.parametrize(
    ("model", "line", "what"),
    [
        (CallsAnAlias, "an alias of apply", "Round is an autograd.Function"),
        (CallsAPartial, "a partial of apply", "Round is an autograd.Function"),
        (Seeds, "seeds", "seeds torch's random numbers"),
        (Forks, "forks", "seeds torch's random numbers"),
        (PutsBack, "puts back", "seeds torch's random numbers"),
        (SeedsTheGenerator, "seeds the generator", "seeds torch's random numbers"),
        (Maps, "maps", "transforms a function"),
        (TakesAGradientOfAFunction, "a gradient of a function", "transforms a function"),
        (HooksATensor, "hooks a tensor", "a hook on a tensor's gradient"),
        (HooksANode, "hooks a node", "grad_fn"),
        (HooksMany, "hooks many", "grad_fn"),
        (HooksSaved, "hooks what is saved", "hooks on saved tensors"),
        (ChangesData, "changes data", "through .data"),
        (SetsData, "sets data", "through .data"),
        (Freezes, "freezes", "requires_grad of a parameter"),
        (Differentiates, "differentiates", "takes gradients itself"),
        (OwnGenerator, "a generator of its own", "torch.Generator"),
        (ChangesATensor, "a tensor that is no buffer", "neither a buffer nor an input"),
    ],
)
def test_the_line_is_named(model: type[Base], line: str, what: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(model(), torch.randn(6, 4))
    assert what in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, line))
    assert refused.value.legal and refused.value.attempt


def _of_the_module(model: Base) -> None:
    model.linear.register_full_backward_hook(double)


def _before_the_module(model: Base) -> None:
    model.linear.register_full_backward_pre_hook(double)


def _of_a_parameter(model: Base) -> None:
    model.linear.weight.register_hook(double)


def _after_a_parameters_gradient(model: Base) -> None:
    model.linear.weight.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize(
    ("register", "owner"),
    [
        (_of_the_module, "the module linear"),
        (_before_the_module, "the module linear"),
        (_of_a_parameter, "the parameter linear.weight"),
        (_after_a_parameters_gradient, "the parameter linear.weight"),
    ],
)
def test_a_backward_hook_that_was_registered_before_is_refused_where_it_is_written(register: Any, owner: str) -> None:
    model = Base()
    register(model)
    with pytest.raises(CaptureError, match=f"{owner} has a .*hook.*: it would be lost") as refused:
        capture(model, torch.randn(6, 4))
    assert refused.value.where.startswith(line_of(__file__, "the hook"))


def test_forward_hooks_are_traced_and_activations_saved_on_the_cpu_are_left_to_the_plan() -> None:
    class Saves(Base):
        def change(self, y: Tensor) -> Tensor:
            with save_on_cpu():
                return torch.tanh(y)

    model, x = Saves(), torch.randn(6, 4)
    model.linear.register_forward_hook(lambda module, args, output: output * 3)
    captured = capture(model, x)
    assert "save_on_cpu" in captured.notes[0] and "is left out" in captured.notes[0]
    assert torch.equal(captured.graph_module(x), model(x))


class BranchesInATry(Base):
    def change(self, y: Tensor) -> Tensor:
        try:
            if y.sum() > 0:  # branches
                y = 2 * y
        except Exception:
            y = 3 * y
        return y


class ComparesInATry(Base):
    def change(self, y: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            while y.max().item() > 1:  # compares
                y = y / 2
        return y


class LeavesTorchInATry(Base):
    def change(self, y: Tensor) -> Tensor:
        try:
            return y * float(y.detach().numpy().max())  # leaves torch
        except RuntimeError:
            return y


class AppliesInATry(Base):
    def change(self, y: Tensor) -> Tensor:
        try:
            return Round.apply(y)  # applies
        except Exception:
            return y


@pytest.mark.parametrize(
    ("model", "line", "what"),
    [
        (BranchesInATry, "branches", "control flow depends on a tensor's values"),
        (ComparesInATry, "compares", "control flow depends on a tensor's values"),
        (LeavesTorchInATry, "leaves torch", "control flow depends on a tensor's values"),
        (AppliesInATry, "applies", "Round is an autograd.Function"),
    ],
)
def test_what_the_forward_itself_catches_is_refused_all_the_same(model: type[Base], line: str, what: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(model(), torch.randn(6, 4))
    assert what in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, line))


class Falls(Base):
    """Errors that training has as well are the model's own way."""

    def change(self, y: Tensor) -> Tensor:
        try:
            return y @ y
        except RuntimeError:
            return F.relu(y @ y.new_ones(4, 4))


def test_an_error_that_training_has_too_takes_the_same_way() -> None:
    model, x = Falls(), torch.randn(6, 4)
    assert torch.equal(capture(model, x).graph_module(x), model(x))

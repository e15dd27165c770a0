"""Where samples meet is found with the user's line, and what keeps them apart is let through."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture.coupling import trace_batch
from autoplan.capture.loss import decompose
from tests.support.splitting import captured, disagreements

HERE = Path(__file__).name


class Model(nn.Module):
    """x [B, 6, 8] through ``body``, then the mean of the result."""

    def __init__(self, body: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.inner = _module_of(body)
        self.inner.modules_given = nn.ModuleList(modules)
        self.inner.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).pow(2).mean()


def _module_of(body: Callable[..., Tensor]) -> nn.Module:
    """A module whose forward is ``body``: torch keeps the source lines of functions called forward alone."""
    code = body.__code__.replace(co_name="forward")
    forward = types.FunctionType(code, body.__globals__, "forward", None, body.__closure__)
    return type("Body", (nn.Module,), {"forward": forward})()


def batch_of(samples: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 6, 8, generator=torch.Generator().manual_seed(0))}


def line_of(function: Callable[..., object], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


# --- samples meet ---------------------------------------------------------------------------------------------------


def batch_norm(m: Model, x: Tensor) -> Tensor:
    y = x @ m.weight
    return F.batch_norm(y.transpose(1, 2), None, None, training=True)  # HERE


def statistics_by_hand(m: Model, x: Tensor) -> Tensor:
    y = x @ m.weight
    return y - y.mean(0)  # HERE


def contrastive(m: Model, x: Tensor) -> Tensor:
    z = F.normalize((x @ m.weight).mean(1), dim=-1)
    return z @ z.t()  # HERE


def softmax_over_batch(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight).softmax(0)  # HERE


def cumulative(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight).cumsum(dim=0)  # HERE


def neighbour(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight + x.roll(1, 0)  # HERE


def reversed_batch(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight + x.flip(0)  # HERE


def first_sample(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight - x[:1]  # HERE


def differences(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight)[1:]  # HERE


def sorted_batch(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight).sort(dim=0).values  # HERE


def top_of_batch(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight).flatten(0, 1).topk(3, dim=0).values  # HERE


def largest_in_batch(m: Model, x: Tensor) -> Tensor:
    y = x @ m.weight
    return y / y.abs().max()  # HERE


def norm_of_batch(m: Model, x: Tensor) -> Tensor:
    y = x @ m.weight
    return y / y.norm()  # HERE


def pairwise_differences(m: Model, x: Tensor) -> Tensor:
    y = (x @ m.weight).mean(1)
    return y[:, None] - y[None, :]  # HERE


def gram(m: Model, x: Tensor) -> Tensor:
    y = (x @ m.weight).mean(1)
    return y @ (y.t() @ y)  # HERE


def attention_over_the_batch(m: Model, x: Tensor) -> Tensor:
    q = (x @ m.weight).transpose(0, 1)
    return F.scaled_dot_product_attention(q, q, q)  # HERE


def position_in_batch(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight * torch.arange(x.shape[0])[:, None, None]  # HERE


def mixed_up(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight + x[torch.randperm(x.shape[0])]  # HERE


def cuts_through(m: Model, x: Tensor) -> Tensor:
    return (x @ m.weight).transpose(0, 1).reshape(x.shape[0], 6, 8)  # HERE


COUPLED = [
    batch_norm, statistics_by_hand, contrastive, softmax_over_batch, cumulative, neighbour, reversed_batch,
    first_sample, sorted_batch, top_of_batch, largest_in_batch, norm_of_batch, pairwise_differences, gram,
    attention_over_the_batch, position_in_batch, mixed_up,
]  # fmt: skip


@pytest.mark.parametrize("body", COUPLED, ids=lambda body: body.__name__)
def test_where_samples_meet_is_named_with_the_users_line(body: Callable[..., Tensor]) -> None:
    capture = captured(Model(body), batch_of())
    assert len(capture.couplings) == 1, capture.couplings
    coupling = capture.couplings[0]
    assert coupling.where.endswith(f"{HERE}:{line_of(body, '# HERE')}")
    assert coupling.operator and coupling.reason


@pytest.mark.parametrize(("body", "operator"), [(cuts_through, "reshape"), (differences, "slice")])
def test_in_a_graph_of_one_batch_size_too(body: Callable[..., Tensor], operator: str) -> None:
    """These don't trace at any batch size: torch sees that they need more than one sample."""
    capture = captured(Model(body), batch_of(), dynamic=False)
    assert [coupling.operator for coupling in capture.couplings] == [operator]
    assert capture.couplings[0].where.endswith(f"{HERE}:{line_of(body, '# HERE')}")


def test_each_batch_normalisation_is_listed_and_their_counters_are_not() -> None:
    model = nn.Sequential(nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
    capture = captured(Model(lambda m, x: m.modules_given[0](x), model), batch_of())
    assert [coupling.operator for coupling in capture.couplings] == ["batch_norm"]
    nodes = [node for node in capture.graph_module.graph.nodes if "batch_norm" in str(node.target)]
    assert len(nodes) == 2  # on one line of the user's code, so they are one place


def test_batch_normalisation_in_evaluation_keeps_samples_apart() -> None:
    model = Model(lambda m, x: m.modules_given[0](x), nn.BatchNorm1d(6)).eval()
    assert captured(model, batch_of()).couplings == ()


def test_a_buffer_that_counts_forwards_is_a_coupling() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.linear(x).mean()

    couplings = captured(Counting(), batch_of()).couplings
    assert "steps" in couplings[0].reason
    assert couplings[0].where.endswith(f"{HERE}:{line_of(Counting.forward, 'steps += 1')}")


# --- samples keep apart ---------------------------------------------------------------------------------------------


def layer_norms(m: Model, x: Tensor) -> Tensor:
    return F.rms_norm(F.layer_norm(x @ m.weight, (8,)), (6, 8))


def group_norm(m: Model, x: Tensor) -> Tensor:
    return F.group_norm(x @ m.weight, 3)


def instance_norm(m: Model, x: Tensor) -> Tensor:
    return F.instance_norm(x @ m.weight)


def convolutions(m: Model, x: Tensor) -> Tensor:
    y = F.max_pool1d(F.conv1d(x @ m.weight, torch.ones(4, 6, 3)), 2)
    return F.interpolate(y, scale_factor=2.0)


def plain_attention(m: Model, x: Tensor) -> Tensor:
    q = (x @ m.weight).view(x.shape[0], 6, 2, 4).transpose(1, 2)
    scores = (q @ q.transpose(-1, -2)).masked_fill(torch.ones(6, 6).tril() == 0, float("-inf"))
    y = F.dropout(scores.softmax(-1), 0.1, True) @ q
    return y.transpose(1, 2).reshape(x.shape[0], 6, 8) + F.scaled_dot_product_attention(x, x, x, is_causal=True)


def sequence_first_attention(m: Model, x: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    return m.modules_given[0](y, y, y)[0]


def encoder(m: Model, x: Tensor) -> Tensor:
    return m.modules_given[0](x)


def recurrent(m: Model, x: Tensor) -> Tensor:
    out, (hidden, _) = m.modules_given[0](x)
    return out + hidden[-1][:, None]


def rotary(m: Model, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(6).float(), torch.arange(4).float())
    a, b = (x @ m.weight).chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def dense_mixture(m: Model, x: Tensor) -> Tensor:
    flat = x.reshape(-1, 8)
    chances, chosen = (flat @ m.weight).softmax(-1).topk(2)
    gates = torch.zeros_like(flat).scatter(1, chosen, chances)
    return torch.einsum("nd,de,ne->ne", flat, m.weight, gates).view(x.shape)


def mixture_by_selection(m: Model, x: Tensor) -> Tensor:
    flat = x.reshape(-1, 8)
    chances, chosen = (flat @ m.weight).softmax(-1).topk(2)
    out = torch.zeros_like(flat)
    for expert in range(3):
        token, slot = torch.where(chosen == expert)
        out.index_add_(0, token, (flat[token] @ m.weight) * chances[token, slot, None])
    return out.view(x.shape)


def last_token(m: Model, x: Tensor) -> Tensor:
    last = (x[..., 0] > 0).long().argmax(-1)
    return (x @ m.weight)[torch.arange(x.shape[0]), last]


def two_views(m: Model, x: Tensor) -> Tensor:
    both = (torch.cat([x, -x]) @ m.weight).view(2, x.shape[0], 6, 8)
    return both[0] * both[1]


def several_draws(m: Model, x: Tensor) -> Tensor:
    return (x.repeat_interleave(3, dim=0) @ m.weight).view(x.shape[0], 3, 6, 8).mean(1)


def written_in_place(m: Model, x: Tensor) -> Tensor:
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 1.0
    return shifted.masked_fill_(x > 1, 0.0) @ m.weight


def frozen(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x @ m.weight
    return x @ m.weight - y.mean(1, keepdim=True)


def normalised_by_hand(m: Model, x: Tensor) -> Tensor:
    y = x @ m.weight
    return (y - y.mean(dim=(1, 2), keepdim=True)) / (y.var(dim=(1, 2), keepdim=True) + 1e-5).sqrt()


def scaled_by_the_batch_size(m: Model, x: Tensor) -> Tensor:
    return x @ m.weight / x.shape[0]


def permutations(m: Model, x: Tensor) -> Tensor:
    y = (x @ m.weight).permute(1, 2, 0).movedim(-1, 1).reshape(-1, 8)  # [6 * B, 8]
    return (y @ m.weight).view(6, x.shape[0], 8).transpose(0, 1)


APART: list[tuple[Callable[..., Tensor], tuple[nn.Module, ...]]] = [
    (layer_norms, ()), (group_norm, ()), (instance_norm, ()), (convolutions, ()), (plain_attention, ()),
    (sequence_first_attention, (nn.MultiheadAttention(8, 2),)),
    (encoder, (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),)),
    (recurrent, (nn.LSTM(8, 8, 2, batch_first=True),)), (rotary, ()), (dense_mixture, ()), (mixture_by_selection, ()),
    (last_token, ()), (two_views, ()), (several_draws, ()), (written_in_place, ()), (frozen, ()),
    (normalised_by_hand, ()), (scaled_by_the_batch_size, ()), (permutations, ()),
]  # fmt: skip


@pytest.mark.parametrize(("body", "modules"), APART, ids=[body.__name__ for body, _ in APART])
@pytest.mark.filterwarnings("ignore")
def test_what_keeps_samples_apart_is_let_through(body: Callable[..., Tensor], modules: tuple[nn.Module, ...]) -> None:
    """No coupling, a rule for every operator, and each value's rows are what each sample gives by itself."""
    capture = captured(Model(body, *modules).eval(), batch_of())
    assert capture.couplings == ()
    assert decompose(capture.graph_module, capture.inputs).notes == ()
    if body not in (scaled_by_the_batch_size, plain_attention):  # it needs the totals; its dropout is chance
        flow = trace_batch(capture.graph_module, capture.inputs)
        wrong, compared = disagreements(capture.graph_module, flow, batch_of())
        assert wrong == []
        assert compared >= 3


def test_an_unknown_operator_that_leaves_the_batch_where_it_is_passes_with_a_note() -> None:
    with torch.library._scoped_library("autoplan_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        capture = captured(Model(lambda m, x: torch.ops.autoplan_test.twice(x) @ m.weight), batch_of())
        notes = decompose(capture.graph_module, capture.inputs).notes
    assert capture.couplings == ()
    assert len(notes) == 1 and "autoplan_test.twice" in notes[0]


def test_an_unknown_operator_that_moves_the_batch_is_a_coupling() -> None:
    with torch.library._scoped_library("autoplan_test", "DEF") as library:
        library.define("turn(Tensor x) -> Tensor")
        library.impl("turn", lambda x: x.transpose(0, 1).clone(), "CompositeExplicitAutograd")
        library.impl("turn", lambda x: x.new_empty(x.shape[1], x.shape[0], x.shape[2]), "Meta")
        capture = captured(Model(lambda m, x: torch.ops.autoplan_test.turn(x) @ m.weight), batch_of())
    assert [coupling.operator for coupling in capture.couplings] == ["turn"]


def test_a_parameter_with_a_row_for_each_sample_is_a_coupling() -> None:
    """Only a static graph can have one."""

    class RowEach(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(4, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.rows).mean()

    coupling = captured(RowEach(), batch_of(), dynamic=False).couplings[0]
    assert "a row of its own" in coupling.reason

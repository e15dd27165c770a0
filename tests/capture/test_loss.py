"""The loss as a sum of terms: which, with what coefficient, and what their means count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture.loss import analyse
from autoplan.capture.types import LossTerm
from tests.support.splitting import capture_of, captured, trace

Batch = dict[str, Tensor]


class Model(nn.Module):
    """``logits`` [B, 3] of x [B, 4]; the loss is ``criterion(model, logits, batch)``."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("class_weight", torch.tensor([0.5, 1.0, 2.5]))
        self.criterion = criterion

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return self.criterion(self, self.linear(x), y, t)


def batch_of(samples: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(samples, 4, generator=generator),
        "y": torch.randint(3, (samples,), generator=generator),
        "t": torch.rand(samples, 3, generator=generator),
    }


def terms_of(criterion: Callable[..., Tensor]) -> list[tuple[str, str, float]]:
    capture = captured(Model(criterion), batch_of())
    assert capture.couplings == ()
    return [(term.reduction, term.weight, term.coefficient) for term in capture.loss_terms]


def test_a_mean_over_targets_counts_targets() -> None:
    assert terms_of(lambda m, o, y, t: F.cross_entropy(o, y)) == [("mean", "targets", 1.0)]
    assert terms_of(lambda m, o, y, t: F.nll_loss(o.log_softmax(-1), y, weight=m.class_weight)) == [
        ("mean", "targets", 1.0)
    ]


def test_a_mean_over_class_probabilities_counts_elements() -> None:
    assert terms_of(lambda m, o, y, t: F.cross_entropy(o, t.softmax(-1))) == [("mean", "elements", 1.0)]


def test_coefficients_multiply_along_the_way_and_add_where_ways_meet() -> None:
    def criterion(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
        entropy = F.cross_entropy(o, y)
        return entropy + 3 * (entropy / 2 - F.mse_loss(o, t))

    assert terms_of(criterion) == [("mean", "targets", 2.5), ("mean", "elements", -3.0)]


def test_a_regulariser_and_a_number_are_constants() -> None:
    def criterion(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
        return 1 - (F.cross_entropy(o, y) + 0.1 * m.linear.weight.norm())

    assert terms_of(criterion) == [("mean", "targets", -1.0), ("constant", "none", -1.0), ("constant", "none", 1.0)]


def test_adding_python_zero_is_no_term() -> None:
    assert terms_of(lambda m, o, y, t: sum([F.cross_entropy(o, y), o.mean()])) == [
        ("mean", "targets", 1.0),
        ("mean", "elements", 1.0),
    ]


def test_stacked_losses_share_their_mean() -> None:
    assert terms_of(lambda m, o, y, t: torch.stack([o.sum(), o.pow(2).mean()]).mean()) == [
        ("sum", "none", 0.5),
        ("mean", "elements", 0.5),
    ]


@pytest.mark.parametrize(
    "criterion",
    [
        lambda m, o, y, t: (o * t).sum() / t.sum(),
        lambda m, o, y, t: (o * t).sum() / t.sum().clamp(min=1),
        lambda m, o, y, t: (o * t).sum() / (t.sum() + 1e-8),
        lambda m, o, y, t: (o * t).sum() * (1 / t.sum()),
        lambda m, o, y, t: (o * (t / t.sum())).sum(),
        lambda m, o, y, t: o.sum() / o.shape[0],
        lambda m, o, y, t: o.sum() / (o.shape[0] + 1),
        lambda m, o, y, t: o.sum() * (1 / o.shape[0]),
        lambda m, o, y, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean"),
    ],
)
def test_a_count_of_the_inputs_that_something_divides_by_is_a_total(criterion: Callable[..., Tensor]) -> None:
    assert terms_of(criterion) == [("sum", "none", 1.0), ("total", "node", 0.0)]


def test_terms_name_their_nodes() -> None:
    capture = captured(Model(lambda m, o, y, t: 2 * F.mse_loss(o, t)), batch_of())
    assert capture.loss_terms == (LossTerm(node="mse_loss", reduction="mean", weight="elements", coefficient=2.0),)


def test_the_graph_is_not_changed() -> None:
    graph_module = trace(Model(lambda m, o, y, t: F.cross_entropy(o, y)), batch_of())
    before = str(graph_module.graph)
    analyse(graph_module, capture_of(graph_module, batch_of()).inputs)
    assert str(graph_module.graph) == before


# --- losses that are no sum of terms ------------------------------------------------------------------------------


def product_of_means(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return o.mean() * F.mse_loss(o, t)


def exponential_of_a_mean(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, y).exp()


def logarithm_of_a_mean(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return -(o.sigmoid().mean()).log()


def root_of_a_mean(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(o, t).sqrt()


def ratio_of_model_values(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return (o * t).sum() / o.sigmoid().sum()


def dice(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def deviation(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return o.std()


def in_batch_softmax(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    scores = o @ t.t()
    return F.cross_entropy(scores, torch.arange(o.shape[0]))


def expert_balance(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    chances = o.softmax(-1)
    chosen = F.one_hot(chances.argmax(-1), 3).float()
    return (chosen.mean(0) * chances.mean(0)).sum()


def hardest_sample(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none").max()


def targets_from_the_model(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, o.argmax(-1))


def random_mask(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    mask = torch.rand_like(t) > 0.5
    return (o * mask).sum() / mask.sum()


def selected_by_the_model(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return t[o > 0].mean()


def nested_totals(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    shares = t / t.sum()
    return (o * shares).sum() / shares.pow(2).sum()


def as_a_python_number(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return (o * t.sum().item()).mean()


def how_many_were_selected(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return o.sum() / y[y > 0].shape[0]


def per_sample(m: Model, o: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return o


COUPLED = {
    product_of_means: "mul", exponential_of_a_mean: "exp", logarithm_of_a_mean: "log", root_of_a_mean: "sqrt",
    ratio_of_model_values: "div", dice: "div", deviation: "std", in_batch_softmax: "matmul", expert_balance: "mul",
    hardest_sample: "max", targets_from_the_model: "cross_entropy_loss", random_mask: "div",
    selected_by_the_model: "mean",
    nested_totals: "div", as_a_python_number: "item", how_many_were_selected: "div",
    per_sample: "linear",
}  # fmt: skip


@pytest.mark.parametrize(("criterion", "operator"), COUPLED.items(), ids=[body.__name__ for body in COUPLED])
def test_a_loss_that_is_no_sum_of_terms_is_a_coupling(criterion: Callable[..., Tensor], operator: str) -> None:
    capture = captured(Model(criterion), batch_of())
    assert capture.loss_terms == ()
    assert [coupling.operator for coupling in capture.couplings] == [operator]
    assert capture.couplings[0].where.rpartition(":")[0].endswith("test_loss.py")


def test_samples_that_meet_in_the_model_leave_the_terms_known() -> None:
    capture = captured(Model(lambda m, o, y, t: F.cross_entropy(o - o.mean(0), y)), batch_of())
    assert [coupling.operator for coupling in capture.couplings] == ["mean"]
    assert [term.reduction for term in capture.loss_terms] == ["mean"]

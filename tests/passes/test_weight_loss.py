"""Parts of the batch add up to the whole: loss and every gradient, for each form of loss and however it is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autoplan.capture.types import Capture
from autoplan.passes.weight_loss import WeightedLoss, weight_loss
from tests.support.splitting import (
    assert_same,
    assert_splits,
    captured,
    first,
    run_in_parts,
    run_whole,
)

Batch = dict[str, Tensor]
aten = torch.ops.aten


class Model(nn.Module):
    """x [B, T, 4] -> logits [B, T, 3]; y [B, T] is -100 where nothing counts, t [B, T, 3], mask [B, T] of 0s and 1s."""

    def __init__(self, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("class_weight", torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64))
        self.criterion = criterion

    def forward(self, x: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return self.criterion(self, self.linear(x), y, t, mask)


def entropy(o: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), **options)


def masked_mean(o: Tensor, mask: Tensor, least: float = 1.0) -> Tensor:
    return (o.pow(2).sum(-1) * mask).sum() / mask.sum().clamp(min=least)


def shifted(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    """As Hugging Face's causal models: labels padded by one and moved."""
    labels = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(o.view(-1, 3), labels.view(-1), ignore_index=-100, reduction="mean")


def labels_written_in_place(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    labels = y.clone()
    labels[mask == 0] = -100
    labels.masked_fill_(labels == 2, -100)
    return F.cross_entropy(o.transpose(1, 2), labels)


def own_ignore_index(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return entropy(o, torch.where(y < 0, 1, y), ignore_index=1)


def weighted_by_hand(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    share = mask / (mask.sum() + 1e-6)
    return (o.pow(2).mean(-1) * share).sum()


def uncertainty(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    """Kendall et al. 2018: losses weighted by learnt scales."""
    return (-m.scale).exp() * F.mse_loss(o, t) + m.scale + entropy(o, y, reduction="sum") / 2


def added_in_place(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    loss = F.mse_loss(o, t)
    loss += 0.1 * F.l1_loss(o, t)
    return loss * 2


FORMS: dict[str, Callable[[Model, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda m, o, y, t, k: entropy(o, y),
    "class weights": lambda m, o, y, t, k: entropy(o, y, weight=m.class_weight),
    "label smoothing": lambda m, o, y, t, k: entropy(o, y, label_smoothing=0.2),
    "both": lambda m, o, y, t, k: entropy(o, y, weight=m.class_weight, label_smoothing=0.2),
    "class dimension in the middle": lambda m, o, y, t, k: F.cross_entropy(o.transpose(1, 2), y),
    "probabilities": lambda m, o, y, t, k: F.cross_entropy(o.transpose(1, 2), t.softmax(-1).transpose(1, 2)),
    "cross entropy, sum": lambda m, o, y, t, k: entropy(o, y, reduction="sum"),
    "cross entropy, none and masked": lambda m, o, y, t, k: (
        (entropy(o, y, reduction="none") * k.flatten()).sum() / (k.sum() + 1)
    ),
    "cross entropy, none and mean": lambda m, o, y, t, k: entropy(o, y, reduction="none").mean(),
    "own ignore_index": own_ignore_index,
    "nll": lambda m, o, y, t, k: F.nll_loss(o.log_softmax(-1).flatten(0, 1), y.flatten(), weight=m.class_weight),
    "shifted labels": shifted,
    "labels written in place": labels_written_in_place,
    "mse": lambda m, o, y, t, k: F.mse_loss(o, t),
    "l1": lambda m, o, y, t, k: F.l1_loss(o, t),
    "smooth l1": lambda m, o, y, t, k: F.smooth_l1_loss(o, t, beta=0.3),
    "huber": lambda m, o, y, t, k: F.huber_loss(o, t, delta=0.3),
    "binary": lambda m, o, y, t, k: F.binary_cross_entropy(o.sigmoid(), t),
    "binary with logits": lambda m, o, y, t, k: F.binary_cross_entropy_with_logits(o, t, pos_weight=m.class_weight),
    "kl": lambda m, o, y, t, k: F.kl_div(o.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="mean"),
    "kl, batchmean": lambda m, o, y, t, k: F.kl_div(o.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "cosine": lambda m, o, y, t, k: F.cosine_embedding_loss(o[:, 0], t[:, 0], k[:, 0] * 2 - 1),
    "triplet": lambda m, o, y, t, k: F.triplet_margin_loss(o[:, 0], t[:, 0], t[:, 0] * 2),
    "mean": lambda m, o, y, t, k: o.pow(2).mean(),
    "mean over dimensions": lambda m, o, y, t, k: o.pow(2).mean((0, 2)).sum(),
    "mean of means": lambda m, o, y, t, k: o.pow(2).sum((1, 2)).mean(),
    "sum over the batch size": lambda m, o, y, t, k: o.pow(2).sum() / o.shape[0],
    "sum over one more": lambda m, o, y, t, k: o.pow(2).sum() / (o.shape[0] + 1),
    "masked mean": lambda m, o, y, t, k: masked_mean(o, k),
    "shares of a mask": weighted_by_hand,
    "selected": lambda m, o, y, t, k: o[k > 0].pow(2).mean(),
    "selected, twice": lambda m, o, y, t, k: (o - t)[y >= 0].abs().mean(),
    "last token": lambda m, o, y, t, k: F.mse_loss(o[torch.arange(o.shape[0]), k.argmax(-1)], t[:, 0]),
    "regulariser": lambda m, o, y, t, k: 0.5 + entropy(o, y) + 0.01 * m.linear.weight.pow(2).sum(),
    "one minus": lambda m, o, y, t, k: 1 - F.cosine_similarity(o, t, dim=-1).mean(),
    "learnt scales": uncertainty,
    "stacked": lambda m, o, y, t, k: torch.stack([entropy(o, y), F.mse_loss(o, t), m.scale]).mean(),
    "added in place": added_in_place,
    "regulariser only": lambda m, o, y, t, k: m.linear.weight.pow(2).sum(),
}


def batch_of(sizes: list[int], counted: list[bool], length: int = 2) -> Batch:
    """Random values; sample i has targets that count where ``counted[i * length + token]``."""
    samples = sum(sizes)
    generator = torch.Generator().manual_seed(7 * samples + len(sizes))
    y = torch.randint(3, (samples, length), generator=generator)
    counts = torch.tensor(counted[: samples * length]).view(samples, length)
    return {
        "x": torch.randn(samples, length, 4, generator=generator, dtype=torch.float64),
        "y": torch.where(counts, y, -100),
        "t": torch.rand(samples, length, 3, generator=generator, dtype=torch.float64),
        "mask": counts.double(),
    }


@functools.cache
def prepared(form: str) -> tuple[Model, Capture, WeightedLoss]:
    model = Model(FORMS[form])
    capture = captured(model, batch_of([5], [True] * 10))
    return model, capture, weight_loss(capture)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), pattern=st.lists(st.booleans(), min_size=24, max_size=24)
)
def test_contributions_of_parts_add_up_to_the_whole(form: str, sizes: list[int], pattern: list[bool]) -> None:
    model, capture, weighted = prepared(form)
    assert capture.couplings == ()
    pattern[0] = pattern[1] = True  # something counts, somewhere; where nothing does is a test of its own
    batch = batch_of(sizes, pattern)
    batch["y"][0], batch["mask"][0] = 0, 1.0
    assert_same(run_whole(model, batch), run_in_parts(weighted, batch, sizes))


def test_a_part_that_counts_nothing_contributes_zero() -> None:
    model, _, weighted = prepared("cross entropy")
    batch = batch_of([2], [False] * 4)
    contribution = first(weighted.graph_module(**batch, loss_total_0=torch.tensor(3.0, dtype=torch.float64)))
    assert contribution.item() == 0.0
    contribution.backward()
    assert model.linear.weight.grad is not None and model.linear.weight.grad.abs().max() == 0.0
    model.zero_grad()


@pytest.mark.parametrize("form", ["cross entropy", "class weights"])
def test_where_nothing_counts_at_all_the_loss_is_the_single_process_s(form: str) -> None:
    model, _, weighted = prepared(form)
    batch = batch_of([2, 1], [False] * 6)
    assert torch.tensor(run_whole(model, batch).loss).isnan()
    assert torch.tensor(run_in_parts(weighted, batch, [2, 1]).loss).isnan()


def test_weights_are_what_counts_in_each_part() -> None:
    """Sample 0 has 1 target, sample 1 two: weights 1 and 2, with classes 1 and 1.0, 2.5."""
    batch = batch_of([2], [True, False, True, True])
    batch["y"] = torch.tensor([[1, -100], [2, 1]])
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(2)]

    def weights(form: str) -> list[tuple[float, ...]]:
        results = [prepared(form)[2].weights(**part) for part in parts]
        assert all(weight.dtype == torch.float64 and weight.dim() == 0 for result in results for weight in result)
        return [tuple(weight.item() for weight in result) for result in results]

    assert weights("cross entropy") == [(1.0,), (2.0,)]
    assert weights("class weights") == [(1.0,), (3.5,)]
    assert weights("mse") == [(6.0,), (6.0,)]  # 1 sample x 2 tokens x 3 classes
    assert weights("masked mean") == [(1.0, 1.0), (1.0, 2.0)]  # a sum, and the mask's total
    assert weights("regulariser") == [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0)] or weights("regulariser") == [
        (1.0, 1.0, 1.0),
        (1.0, 2.0, 1.0),
    ]


def test_weights_need_no_parameter() -> None:
    for form in FORMS:
        weights = prepared(form)[2].weights
        assert list(weights.parameters()) == []
        assert [n.name for n in weights.graph.nodes if n.op == "placeholder"] == ["x", "y", "t", "mask"]


def test_the_batch_is_not_changed_by_the_weights() -> None:
    def criterion(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        y.masked_fill_(mask == 0, -100)
        return entropy(o, y)

    weights = weight_loss(captured(Model(criterion), batch_of([5], [True] * 10))).weights
    batch = batch_of([2], [True, False, True, True])
    batch["y"] = torch.zeros(2, 2, dtype=torch.long)
    assert [weight.item() for weight in weights(**batch)] == [3.0]
    assert batch["y"].tolist() == [[0, 0], [0, 0]]


def test_before_and_after() -> None:
    """A mean becomes one node with reduction sum, divided by a total that comes after the batch's placeholders."""
    _, capture, weighted = prepared("cross entropy")
    before = [str(node.target) for node in capture.graph_module.graph.nodes if node.op == "call_function"]
    after = [str(node.target) for node in weighted.graph_module.graph.nodes if node.op == "call_function"]
    assert after == [*before, "aten.div.Tensor"]
    names = [node.name for node in weighted.graph_module.graph.nodes if node.op == "placeholder"]
    assert names == ["x", "y", "t", "mask", "loss_total_0"]
    (entropy_node,) = [n for n in weighted.graph_module.graph.nodes if n.target is aten.cross_entropy_loss.default]
    assert entropy_node.args[3] == 2  # at::Reduction::Sum


@pytest.mark.parametrize("form", FORMS)
def test_the_captured_graph_stays_as_it_was_and_new_nodes_are_complete(form: str) -> None:
    model, capture, weighted = prepared(form)
    for node in capture.graph_module.graph.nodes:
        assert not node.name.startswith("loss_total")
        if node.op == "placeholder":  # looking at a graph must not fix its batch
            assert isinstance(node.meta["val"].shape[0], torch.SymInt) and node.meta["val"].shape[0].node.expr.is_symbol
    theirs, ours = dict(capture.graph_module.named_parameters()), dict(weighted.graph_module.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    assert all(ours[name] is dict(model.named_parameters())[name] for name in theirs)
    assert dict(weighted.graph_module.named_buffers()).keys() == dict(capture.graph_module.named_buffers()).keys()
    for graph_module in (weighted.graph_module, weighted.weights):
        graph_module.graph.lint()
        for node in graph_module.graph.nodes:
            if node.op in ("call_function", "placeholder"):
                assert "val" in node.meta or "submod" in node.name, node
    old = {node.name for node in capture.graph_module.graph.nodes}
    for node in weighted.graph_module.graph.nodes:
        if node.op == "call_function" and node.name not in old:
            assert "stack_trace" in node.meta, node


def test_half_precision_is_summed_in_single() -> None:
    """A sum of 10,000 squares of 3 is 90,000, beyond float16's 65,504, though their mean is 9."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).pow(2).mean()

    model, batch = Half(), {"x": torch.ones(100, 100, dtype=torch.float16)}
    parts = run_in_parts(weight_loss(captured(model, batch)), batch, [60, 40])
    assert parts.loss == pytest.approx(9.0, rel=1e-3)
    assert parts.gradients["weight"].item() == pytest.approx(6.0, rel=2e-3)


# --- couplings ------------------------------------------------------------------------------------------------------


def batch_normalised(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(F.batch_norm(o.transpose(1, 2), None, None, training=True), y)


def contrastive(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(o[:, 0] @ t[:, 0].t(), torch.arange(o.shape[0])) + F.mse_loss(o, t)


def logarithm(m: Model, o: Tensor, y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(o, t).log() + 0.5


@pytest.mark.parametrize("criterion", [batch_normalised, contrastive, logarithm])
@pytest.mark.parametrize("samples", [1, 5])
def test_a_coupled_loss_in_one_piece_is_exactly_the_original(criterion: Callable[..., Tensor], samples: int) -> None:
    model = Model(criterion)
    capture = captured(model, batch_of([5], [True] * 10))
    assert capture.couplings
    batch = batch_of([samples], [True] * 10)
    whole, parts = run_whole(model, batch), run_in_parts(weight_loss(capture), batch, [samples])
    assert whole.loss == parts.loss
    for name, gradient in whole.gradients.items():
        assert torch.allclose(gradient, parts.gradients[name], rtol=1e-12, atol=1e-14)


def test_a_graph_of_one_batch_size_in_one_piece() -> None:
    model, batch = Model(FORMS["regulariser"]), batch_of([5], [True, False] * 5)
    capture = captured(model, batch, dynamic=False)
    assert_same(run_whole(model, batch), run_in_parts(weight_loss(replace(capture)), batch, [5]))


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def tokens(samples: int = 6, length: int = 8) -> Batch:
    """Labels ignored unevenly; sample 4 counts nothing."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(64, (samples, length), generator=generator)
    labels[1, 3:], labels[4], labels[2, :5] = -100, -100, -100
    return {"input_ids": torch.randint(64, (samples, length), generator=generator), "labels": labels}


def gpt2() -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, use_cache=False)), tokens()


def llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens()


def mixtral() -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config), tokens()


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=1, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=64, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens()


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
    batch = tokens()
    return BertForMaskedLM(config), batch | {"attention_mask": (batch["input_ids"] > 4).long()}


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=5,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(6, 3, 16, 16, generator=generator, dtype=torch.float64)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 3, 4, 0])}


# Hugging Face casts logits to float32 before the loss, so a float64 model's loss is a sum rounded in float32.
@pytest.mark.parametrize(
    ("build", "tolerance"), [(gpt2, 1e-6), (llama, 1e-6), (t5, 1e-12), (bert, 1e-12), (vit, 1e-12)]
)
def test_hugging_face_models_split(build: Callable[[], tuple[nn.Module, Batch]], tolerance: float) -> None:
    torch.manual_seed(0)
    model, batch = build()
    model.double().eval()
    capture = assert_splits(model, batch, [1, 3, 1, 1], tolerance=tolerance)
    weight = "targets"
    assert [(term.reduction, term.weight, term.coefficient) for term in capture.loss_terms] == [("mean", weight, 1.0)]


def test_routing_tokens_to_experts_splits() -> None:
    """In float32: grouped_mm takes no other. Tokens are sorted by expert across the batch, and put back."""
    torch.manual_seed(0)
    model, batch = mixtral()
    assert_splits(model.eval(), batch, [1, 3, 1, 1], tolerance=2e-6)


def test_the_load_balancing_loss_of_experts_is_a_coupling() -> None:
    """A product of two means over the batch's tokens."""
    model, batch = mixtral()
    model.config.output_router_logits = True
    capture = captured(model.double().eval(), batch)
    assert capture.couplings
    assert all("mixtral" in coupling.where for coupling in capture.couplings)

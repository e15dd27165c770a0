"""Costs of layers: FLOPs in closed form, saved bytes against a real run, operators one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.layers import Attention, Gemm, LayerGraph, Operator
from tests.layers.graphs import small, traced
from tests.layers.oracles import really_saved_bytes, saved_bytes
from tests.support import models

T, H, V, FFN = models.SEQUENCE, models.HIDDEN, models.VOCABULARY, 2 * models.HIDDEN


def operators(graph: LayerGraph) -> list[Operator]:
    return [operator for layer in graph.layers for operator in graph.kinds[layer.kind].operators]


def one(graph: LayerGraph, kind: str) -> Operator:
    return next(operator for operator in operators(graph) if operator.kind == kind)


# ---------------------------------------------------------------------------------------- FLOPs


def test_llama_forward_is_two_flops_a_weight_and_token_and_the_square_of_attention() -> None:
    model, _, _, graph = small("tiny_llama")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    # A product of every query with every key, and of every weight with every value: 2 x 2 x T x T x H a layer.
    attention = 3 * 4 * T * T * H
    assert sum(operator.flops for operator in operators(graph)) == 2 * matrices * T + attention


def test_backward_is_twice_the_forward_of_products_and_two_and_a_half_times_of_attention() -> None:
    block = small("tiny_llama").graph.kinds[1]
    products = sum(op.flops for op in block.operators if op.kind == "gemm")
    attention = sum(op.flops for op in block.operators if op.kind == "attention")
    assert sum(op.backward_flops for op in block.operators) == 2 * products + 2.5 * attention


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    first, second = (
        op for op in operators(small("mlp").graph) if op.kind == "gemm" and op.name in ("linear", "linear_1")
    )
    assert first.backward_flops == first.flops
    assert second.backward_flops == 2 * second.flops


def test_a_frozen_weight_needs_no_gradient_of_its_own() -> None:
    model, batch = models.mlp()
    model.layers[1].weight.requires_grad_(False)  # type: ignore[union-attr, index]
    products = [op for op in operators(traced(model, batch).graph) if op.kind == "gemm"]
    assert [op.backward_flops / op.flops for op in products] == [1.0, 1.0, 2.0]


def test_products_and_attention_carry_their_shapes() -> None:
    graph = small("tiny_llama").graph
    block = graph.kinds[1]
    assert [op.gemm for op in block.operators if op.gemm is not None] == [
        Gemm(m=T, n=H, k=H),
        Gemm(m=T, n=H // 2, k=H),  # two heads of keys for four of queries
        Gemm(m=T, n=H // 2, k=H),
        Gemm(m=T, n=H, k=H),
        Gemm(m=T, n=FFN, k=H),
        Gemm(m=T, n=FFN, k=H),
        Gemm(m=T, n=H, k=FFN),
    ]
    assert one(graph, "attention").attention == Attention(
        heads=4, key_value_heads=2, query_length=T, key_length=T, head_dim=8, value_dim=8, causal=True, masked=False
    )


class HandWritten(nn.Module):
    """Scores, mask, softmax, dropout, weighted sum: as in nanoGPT without flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(H, 3 * H)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).split(H, dim=-1))
        scores = query @ key.transpose(-2, -1) / 8**0.5
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = F.dropout(scores.masked_fill(future, float("-inf")).softmax(-1), 0.1)
        return x + (weights @ value).transpose(1, 2).flatten(2)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HandWritten(), HandWritten()])
        self.router = nn.Linear(H, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * F.softmax(self.router(x), -1).amax(-1, keepdim=True)).mean()


def test_the_core_of_attention_written_by_hand_is_found_and_a_router_is_none() -> None:
    graph = traced(Routed(), {"x": torch.randn(2, T, H)}).graph
    first, _, head = (graph.kinds[layer.kind].operators for layer in graph.layers)
    assert [op.name for op in first if op.core] == ["matmul", "div", "masked_fill", "softmax", "dropout", "matmul_1"]
    assert "softmax" in [op.kind for op in head] and not any(op.core for op in head)
    scores = next(op for op in first if op.name == "matmul")
    assert scores.gemm == Gemm(m=T, n=T, k=8, groups=4, batch_in_groups=True)


# ---------------------------------------------------------------------------------------- saved bytes


@pytest.mark.parametrize("name", ["nano_gpt", "tiny_gpt2", "tiny_llama", "small_cnn", "batch_norm_cnn", "mlp"])
def test_saved_bytes_of_every_layer_are_those_of_a_real_run(name: str) -> None:
    _, batch, captured, graph = small(name)
    real = really_saved_bytes(captured, graph, batch)
    for layer, size in saved_bytes(graph, captured.batch_size).items():
        # What does not grow with the batch is left out: batch norm's two numbers a channel, the loss's total weight.
        assert size == pytest.approx(real[layer], rel=0.01, abs=2 * 8 * 4 + 4), layer


def test_dropout_keeps_a_byte_an_element_as_on_a_gpu() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.layer(x), 0.5).mean()

    graph = traced(Dropping(), {"x": torch.randn(2, 8)}).graph
    assert {op.name: op.saved_bytes for op in operators(graph) if op.saved_bytes} == {"dropout": 8}


def test_flash_attention_keeps_query_key_value_output_and_a_number_a_row() -> None:
    block = small("tiny_llama").graph.kinds[1]
    attention = next(op for op in block.operators if op.kind == "attention")
    # Its own: the output [4 heads, T, 8] and the log-sum-exp [4 heads, T]; query, key and value are their makers'.
    assert attention.saved_bytes == 4 * T * 8 * 4 + 4 * T * 4


def test_rms_norm_keeps_its_input_and_a_number_a_row() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.norm = nn.RMSNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)).sum()

    graph = traced(Normed(), {"x": torch.randn(2, 5, 8)}).graph
    kept = {op.name: op.saved_bytes for op in operators(graph) if op.saved_bytes}
    assert kept == {"linear": 5 * 8 * 4, "rms_norm": 5 * 4}


def test_a_boolean_mask_is_kept_as_numbers_by_each_attention() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            for block in self.blocks:
                q = block(x)[:, None]
                x = F.scaled_dot_product_attention(q, q, q, attn_mask=keep[:, None])[:, 0]
            return x.mean()

    batch = {"x": torch.randn(2, 4, 8), "keep": torch.ones(2, 4, 4, dtype=torch.bool)}
    _, _, captured, graph = traced(Masked(), batch)
    assert saved_bytes(graph, 2) == pytest.approx(really_saved_bytes(captured, graph, batch))


def test_a_static_trace_is_divided_by_its_batch() -> None:
    class Contrastive(nn.Module):
        """Ties its batch to 4 by a table of one row a sample, so the batch cannot be free."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.register_buffer("weights", torch.rand(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x)) * self.weights
            return x.sum()

    batch = {"x": torch.randn(4, 8)}
    _, _, captured, graph = traced(Contrastive(), batch)
    assert not captured.dynamic_batch
    products = [op for op in operators(graph) if op.kind == "gemm"]
    assert [op.gemm for op in products] == [Gemm(m=1, n=8, k=8)] * 2
    assert [op.flops for op in products] == [2 * 8 * 8] * 2
    assert saved_bytes(graph, 4) == pytest.approx(really_saved_bytes(captured, graph, batch))


# ---------------------------------------------------------------------------------------- bytes moved


def test_views_move_nothing_and_a_copy_moves_both_ways() -> None:
    graph = small("nano_gpt").graph
    for op in operators(graph):
        if op.kind == "view":
            assert (op.read_bytes, op.written_bytes, op.saved_bytes) == (0, 0, 0), op.name
    residual = next(op for op in graph.kinds[1].operators if op.target == "aten.add.Tensor")
    assert (residual.read_bytes, residual.written_bytes) == (2 * T * H * 4, T * H * 4)


def test_an_embedding_reads_the_rows_it_is_asked_for() -> None:
    lookup = one(small("nano_gpt").graph, "embedding")
    assert lookup.parameter_bytes == 0
    assert lookup.read_bytes == T * H * 4 + T * 8  # rows in float32, numbers of rows in int64


def test_the_loss_writes_its_log_softmax() -> None:
    loss = one(small("nano_gpt").graph, "cross_entropy")
    assert loss.saved_bytes == T * V * 4
    assert loss.written_bytes >= T * V * 4


def test_tables_of_the_prologue_do_not_grow_with_the_batch() -> None:
    first = small("tiny_llama").graph.kinds[0]
    assert {
        op.target: op.batched for op in first.operators if op.target in ("aten.cos.default", "aten.sin.default")
    } == {
        "aten.cos.default": False,
        "aten.sin.default": False,
    }


def test_input_bytes_are_the_activations_that_enter() -> None:
    graph = small("tiny_llama").graph
    assert [kind.input_bytes for kind in graph.kinds] == [0, T * H * 4, T * H * 4]


def test_operators_name_their_module_and_the_users_line() -> None:
    block = small("nano_gpt").graph.kinds[1]
    product = next(op for op in block.operators if op.kind == "gemm")
    assert product.module_path == "h.0.c_attn"
    assert product.dtype == "fp32"
    assert product.source.rpartition(":")[0].endswith(("models.py", "linear.py"))

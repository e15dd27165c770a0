"""Sequence parallelism on real processes: the single process's losses, gradient norms, gradients and weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import LayerGraph, build_layers
from autoplan.runtime import Program
from autoplan.verification.precision import float64_throughout
from tests.support import models
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import (
    Trained,
    assert_close,
    assert_same_numbers,
    capture_double,
    train_alone,
    train_program,
    written,
)

STEPS = 2
CLUSTER = Cluster.parse("8xA100-80GB")


def _bert() -> tuple[nn.Module, Any]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=64, **dropout)), models.token_batch(8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": models.tiny_gpt2,
    "llama": models.tiny_llama,
    "nanogpt": models.nano_gpt,
    "t5": models.tiny_t5,
    "bert": _bert,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2, "micro_batch_size": 8},
    "tp2-pp2": {"tensor": 2, "pipeline": 2, "micro_batch_size": 2, "micro_batches": 4},
    "tp2-dp2": {"tensor": 2, "data": 2, "micro_batch_size": 2, "micro_batches": 2},
    "tp2-dp2-zero1": {"tensor": 2, "data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 1},
    "tp2-dp2-zero3": {"tensor": 2, "data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 3},
    "tp2-recompute": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2, "recompute": "full"},
    "tp2-pp2-selective": {
        "tensor": 2,
        "pipeline": 2,
        "micro_batch_size": 2,
        "micro_batches": 4,
        "recompute": "selective",
    },
    "tp4": {"tensor": 4, "micro_batch_size": 8},
}
DEFAULT = {("gpt2", "tp2-pp2"), ("llama", "tp2-dp2-zero1"), ("bert", "tp2-recompute"), ("t5", "tp2")}


@pytest.fixture(autouse=True)
def nothing_rounds_to_float32() -> Iterator[None]:
    with float64_throughout():
        yield


@functools.cache
def _prepared(name: str) -> tuple[Capture, LayerGraph, list[Any], Trained]:
    model, batch, captured = capture_double(*MODELS[name]())
    batches = [batch] * STEPS
    return captured, build_layers(captured), batches, train_alone(model, batches)


def program(captured: Capture, layers: LayerGraph, *, recompute: str = "none", **strategy: Any) -> Program:
    degrees = {"data": 1, "tensor": 1, "pipeline": 1, "micro_batches": 1, "schedule": "1f1b", **strategy}
    plan = with_recompute(hand_plan(layers, sequence_parallel=True, **degrees), recompute)
    return Program(captured, plan, layers, cluster=CLUSTER, device="cpu")


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[] if (name, strategy) in DEFAULT else [pytest.mark.wide])
        for name in MODELS
        for strategy in STRATEGIES
    ],
)
def test_every_number_is_the_single_process_s(name: str, strategy: str) -> None:
    captured, layers, batches, alone = _prepared(name)
    made = written(program(captured, layers, **STRATEGIES[strategy]))
    for found in run_ranks(lambda *_: train_program(made, batches), made.plan.gpus):
        assert_same_numbers(found, alone)


def test_dropout_draws_what_the_same_program_draws_without_sequence_parallelism() -> None:
    # Of the residual stream every rank takes its part of one drawing; attention and the perceptron are split by heads
    # and features in both programs, and draw for those.
    torch.manual_seed(0)
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 96}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)).double().train()
    batch = models.token_batch(4)
    captured = capture(model, batch)
    layers = build_layers(captured)
    degrees: dict[str, Any] = {"tensor": 2, "micro_batch_size": 2, "micro_batches": 2}
    whole = Program(captured, hand_plan(layers, **degrees), layers, cluster=CLUSTER, device="cpu")
    shares = program(captured, layers, **degrees)
    again = program(captured, layers, recompute="full", **degrees)
    assert shares.code(0).count("drawn_in_part(") == 1 + 2 * 2  # embeddings, and both branches of a block

    def train(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        for each in (whole, shares, again):
            torch.manual_seed(11)
            each.zero_grad()
            loss = each.step(batch)
            found.append((loss, {name: gradient.clone() for name, gradient in each.gradients().items()}))
        return found

    for (loss, gradients), *others in run_ranks(train, 2):
        for other, found in others:
            assert math.isclose(loss, other, rel_tol=1e-12)
            for name, gradient in gradients.items():
                assert_close(name, found[name], gradient)

"""Mixtures of experts in Megatron's tests: what replaces the MLP of a block, and where its state is.

Tokens are taken as balanced. A rank's experts then see ``s b k etp / tp`` token copies (sequence parallel leaves s / tp
tokens a rank, each goes to k experts, and an expert split over etp ranks gathers theirs). Of a copy are kept: its
permuted input, output and weighted output (2 bytes x 3h), and the MLP's two inner values (2 bytes x 2 f / etp; three
where it is gated). Experts are replicated world / (pp ep etp) times, and that is what their optimizer state divides by.
"""

from __future__ import annotations

import dataclasses

from autoplan.layers.types import LayerKind, Operator, Parameter
from tests.regression.transformer import HALF, Shape

MLP = ("fc1", "gelu", "fc2", "gate", "up", "silu", "mul", "down")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``count`` experts of which a token visits ``visited``; ``local`` are on one rank, split over ``tensor``."""

    count: int
    visited: int
    local: int
    tensor: int
    gated: bool


def with_experts(kind: LayerKind, shape: Shape, experts: Experts) -> LayerKind:
    """The block with a router and one rank's experts, biases included, in place of its MLP."""
    kept = [op for op in kind.operators if op.name not in MLP]
    parameters = [parameter for parameter in kind.parameters if parameter.role != "mlp"]
    router = Parameter(role="router", elements=shape.hidden * experts.count, element_bytes=2)
    outer = shape.ffn // experts.tensor
    inner = 2 * outer if experts.gated else outer
    each = shape.hidden * (inner + outer) + inner + shape.hidden
    weights = Parameter(role="experts", elements=experts.local * each, element_bytes=2, expert=True)
    return dataclasses.replace(
        kind, operators=(*kept, _visits(shape, experts)), parameters=(*parameters, router, weights)
    )


def _visits(shape: Shape, experts: Experts) -> Operator:
    copies = shape.seq * experts.visited * experts.tensor / shape.tensor
    inner = (3 if experts.gated else 2) * shape.ffn / experts.tensor
    return Operator(
        name="experts",
        target="experts",
        kind="grouped_gemm",
        dtype=shape.half,
        saved_bytes=copies * HALF * (3 * shape.hidden + inner),
    )

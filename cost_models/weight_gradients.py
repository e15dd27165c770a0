"""Backwards in two parts: what zero-bubble schedules leave for later, and what they hold for it (Qi et al. 2024).

The runtime puts off the weight gradients of products with a parameter (linear layers): of the two products in their
backward the one of the weight. Until then the product's input and its output's gradient are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.cluster import Device
from autoplan.cost_models.arrays import some
from autoplan.cost_models.compute import operator_time
from autoplan.cost_models.gemm import gemm_time_s
from autoplan.cost_models.software import EAGER, Software

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind, Operator


def weight_gradient_s(kind: LayerKind, device: Device, *, micro_batch: int, software: Software = EAGER) -> float:
    """Seconds of one micro-batch's backward of a layer that weights' gradients take, at most those of its backward."""
    found = 0.0
    for op in kind.operators:
        if is_put_off(op) and op.gemm is not None:
            samples = micro_batch if op.batched else 1
            seconds = {
                product: gemm_time_s(op.gemm, device, dtype=op.dtype, samples=samples, product=product)
                for product in ("input", "weight")
            }
            share = seconds["weight"] / sum(seconds.values())
            found = found + share * operator_time(op, device, micro_batch=micro_batch, software=software).backward_s
    return found


def put_aside_bytes(kind: LayerKind, *, samples: float) -> float:
    """Bytes that one micro-batch of ``samples`` holds between the two parts of a layer's backward."""
    return sum(
        (op.read_bytes + op.written_bytes) * (samples if op.batched else 1) for op in kind.operators if is_put_off(op)
    )


def is_put_off(op: Operator) -> bool:
    """A product with a parameter of which both gradients are needed."""
    return op.kind == "gemm" and some((op.parameter_bytes > 0) & (op.flops > 0) & (op.backward_flops >= 2 * op.flops))

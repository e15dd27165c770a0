"""Time of operators on one device: a roofline with the effects that shapes have on it.

    time = max(FLOPs / (peak x efficiency(shape)), bytes / (bandwidth x efficiency)) + gap

Forward and backward are priced apart, the backward from its own products and bytes. FLOPs and bytes of an operator
are for one sample; a batched operator's grow with the micro-batch, an unbatched one's do not. What GEMMs reach is in
:mod:`.gemm`, attention in :mod:`.attention`. The host launches operators one after another: a layer takes at least
its operators x ``launch_s`` (eager), which is what small models feel.

Numbers of an operator may be arrays (:mod:`.arrays`): layers that differ in sizes alone, priced at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.cluster import Device
from autoplan.cost_models import cpu
from autoplan.cost_models.arrays import Number, larger, some
from autoplan.cost_models.attention import attention_time_s
from autoplan.cost_models.gemm import gemm_time_s
from autoplan.cost_models.precision import short_dtype
from autoplan.cost_models.software import EAGER, Software

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind, Operator

# Views are free on the device; the host still dispatches them, at about a third of a kernel's cost.
_VIEW_DISPATCH = 0.3
_CAST_PASSES = {"fp8": 3.0, "fp4": 6.0}
_FUSIBLE = ("elementwise", "normalization", "softmax", "reduction", "copy", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Seconds of one forward and one backward of a micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: OperatorTime) -> OperatorTime:
        return OperatorTime(forward_s=self.forward_s + other.forward_s, backward_s=self.backward_s + other.backward_s)

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def operator_time(op: Operator, device: Device, *, micro_batch: int, software: Software = EAGER) -> OperatorTime:
    """Device seconds of ``op`` for ``micro_batch`` samples, forward and backward."""
    forward, backward = _directions_s(op, device, micro_batch, software)
    return OperatorTime(forward_s=forward, backward_s=backward)


def _directions_s(op: Operator, device: Device, micro_batch: int, software: Software) -> tuple[float, float]:
    if op.kind == "view":
        return 0.0, 0.0
    forward = _forward_s(op, device, micro_batch, software)
    return forward, _backward_s(op, device, micro_batch, software) if op.needs_backward else 0.0


def layer_time(kind: LayerKind, device: Device, *, micro_batch: int, software: Software = EAGER) -> OperatorTime:
    """Seconds of all operators of a layer; collectives are :func:`communication.tensor_time`'s, but on a CPU the copies
    that they work on (:func:`cpu.host_s`)."""
    forward_s = backward_s = 0.0
    forward_launches = backward_launches = 0.0
    for op in kind.operators:
        ahead_s, back_s = _directions_s(op, device, micro_batch, software)
        forward_s, backward_s = forward_s + ahead_s, backward_s + back_s
        weight = _VIEW_DISPATCH if op.kind == "view" else 1.0
        forward_launches += weight
        if op.needs_backward:
            backward_launches += 2.0 if op.kind == "gemm" else weight
    if device.is_cpu:  # nothing runs ahead of a CPU: dispatch adds
        host_forward_s, host_backward_s = cpu.host_s(kind, device, micro_batch=micro_batch)
        return OperatorTime(forward_s=forward_s + host_forward_s, backward_s=backward_s + host_backward_s)
    host = device.launch_s * software.dispatch
    return OperatorTime(
        forward_s=larger(forward_s, host * forward_launches), backward_s=larger(backward_s, host * backward_launches)
    )


def recompute_s(kind: LayerKind, device: Device, *, micro_batch: int, policy: str, software: Software = EAGER) -> float:
    """Seconds that ``policy`` (none, selective, full) adds to one backward of the layer, operators only.

    Full runs the whole forward again, selective the attention core (Korthikanti et al. 2022, section 5).
    """
    if policy == "none":
        return 0.0
    if policy == "full":
        again = _until_last_saved(kind) if software.recompute_stops_early else kind
        return layer_time(again, device, micro_batch=micro_batch, software=software).forward_s
    core = (op for op in kind.operators if op.core)
    return sum(operator_time(op, device, micro_batch=micro_batch, software=software).forward_s for op in core)


def _until_last_saved(kind: LayerKind) -> LayerKind:
    """What runs again where a checkpoint ends with the last saved tensor: the input of the layer's last product."""
    products = [index for index, op in enumerate(kind.operators) if op.kind in ("gemm", "grouped_gemm")]
    return dataclasses.replace(kind, operators=kind.operators[: products[-1]]) if products else kind


def optimizer_step_s(elements: Number, device: Device, *, bytes_per_element: float) -> Number:
    """Seconds of an element-wise optimizer step over ``elements`` parameters (a number, or many) on this rank: fused,
    but on a CPU.

    ``bytes_per_element``: everything read and written for one parameter (:attr:`memory.Recipe.step_bytes`).
    """
    passes = cpu.OPTIMIZER_PASSES if device.is_cpu else 1.0
    return _memory_s(passes * elements * bytes_per_element, device) + device.launch_s


def gradient_accumulation_s(elements: float, device: Device, *, bytes_per_element: float) -> float:
    """Seconds to add one micro-batch's gradients of ``elements`` parameters to those of the ones before: two reads and
    a write of ``bytes_per_element``. The first micro-batch of a step pays nothing: its gradients become the sum."""
    return _memory_s(3.0 * elements * bytes_per_element, device)


def routing_s(routed_bytes: float, device: Device, *, local_experts: int, software: Software = EAGER) -> float:
    """Seconds that a layer of experts costs beside its operators and its transfers, in one direction.

    ``routed_bytes``: of all copies of tokens that this rank's ``local_experts`` get. What moves them, and what the host
    does meanwhile, is in :mod:`autoplan.cost_models.software`."""
    host = software.expert_wait_s + software.expert_launch_s * local_experts
    return host + _memory_s(software.routed_passes * routed_bytes, device)


def _samples(op: Operator, micro_batch: int) -> int:
    return micro_batch if op.batched else 1


def _memory_s(bytes_moved: float, device: Device) -> float:
    return bytes_moved / (device.memory_bytes_per_s * device.memory_efficiency)


def _forward_s(op: Operator, device: Device, micro_batch: int, software: Software) -> float:
    samples = _samples(op, micro_batch)
    moved = (op.read_bytes + op.written_bytes) * samples + op.parameter_bytes
    arithmetic = 0.0
    if op.attention is not None:
        return software.gap_s + attention_time_s(
            op.attention, device, dtype=op.dtype, samples=samples, backward=False, software=software
        )
    if op.gemm is not None:
        arithmetic = gemm_time_s(op.gemm, device, dtype=op.dtype, samples=samples)
        casts = _memory_s(_cast_bytes(op, samples) * software.element_wise_traffic, device)
        return larger(arithmetic, _memory_s(moved, device)) + casts + software.gap_s
    elif op.kind in ("gemm", "grouped_gemm", "convolution", "attention"):
        arithmetic = op.flops * samples / (device.flops(short_dtype(op.dtype)) * device.gemm_efficiency)
    elif some(op.flops):
        arithmetic = op.flops * samples / device.flops("fp32")
    roofline = larger(arithmetic, _memory_s(moved * _traffic(op, software), device)) + software.gap_s
    return roofline + cpu.arithmetic_s(op, device, samples=samples, backward=False) if device.is_cpu else roofline


def _backward_s(op: Operator, device: Device, micro_batch: int, software: Software) -> float:
    samples = _samples(op, micro_batch)
    if op.attention is not None:
        return software.gap_s + attention_time_s(
            op.attention, device, dtype=op.dtype, samples=samples, backward=True, software=software
        )
    moved = _backward_bytes(op, samples) * _traffic(op, software)
    memory = _memory_s(moved, device)
    if op.gemm is not None and some(op.flops):
        # One product a gradient that is needed: of the input, of the weight. backward_flops says how many.
        needed = op.backward_flops / op.flops
        both = gemm_time_s(op.gemm, device, dtype=op.dtype, samples=samples, product="input") + gemm_time_s(
            op.gemm, device, dtype=op.dtype, samples=samples, product="weight"
        )
        casts = _memory_s(_cast_bytes(op, samples) * software.element_wise_traffic, device)
        return larger(both * needed / 2, memory) + casts + software.gap_s * larger(needed, 1.0)
    arithmetic = 0.0
    if op.kind in ("gemm", "grouped_gemm", "convolution", "attention"):
        arithmetic = op.backward_flops * samples / (device.flops(short_dtype(op.dtype)) * device.gemm_efficiency)
    elif some(op.backward_flops):
        arithmetic = op.backward_flops * samples / device.flops("fp32")
    roofline = larger(arithmetic, memory) + software.gap_s
    return roofline + cpu.arithmetic_s(op, device, samples=samples, backward=True) if device.is_cpu else roofline


def _backward_bytes(op: Operator, samples: int) -> float:
    """Bytes that the backward moves: the output's gradient, the inputs again, the inputs' gradients.

    A sum's gradient is the same tensor for both operands: nothing to compute, one accumulation. A copy's or a
    reduction's needs no input. The embedding's is a scatter of the output's gradient into one of the table's size,
    which is zeroed first.
    """
    name = op.target.rpartition("::")[2].split(".")
    if op.kind == "elementwise" and ("add" in name or "add_" in name or "sub" in name):
        return op.written_bytes * samples
    if op.kind in ("copy", "reduction"):
        return (op.written_bytes + op.read_bytes) * samples
    if op.kind == "embedding":
        return 3 * op.written_bytes * samples + op.parameter_bytes
    return (op.written_bytes + 2 * op.read_bytes) * samples + 2 * op.parameter_bytes


def _cast_bytes(op: Operator, samples: int) -> float:
    """Quantising one operand of an 8-bit or 4-bit product: read for the scale, read again, written twice (as it is and
    transposed, for the backward). The operand's 16-bit bytes are about those that the operator reads. Four bits need a
    random Hadamard transform and scales of two levels on top (NVFP4, arXiv 2509.25149, section 4)."""
    passes = _CAST_PASSES.get(short_dtype(op.dtype), 0.0)
    return passes * (op.read_bytes * samples + op.parameter_bytes)


def _traffic(op: Operator, software: Software) -> float:
    return software.element_wise_traffic if op.kind in _FUSIBLE else 1.0

"""Costs of a kind of layer, from two runs of one layer of it (see :mod:`autoplan.layers.measure`).

A quantity q of an operator is q(b) = fixed + b · per sample. Runs at b = 2 and 3 give both (1 would make sizes of one,
which broadcast and stride unlike others). Reported is q(1) for FLOPs and bytes moved, and the per-sample part for
saved bytes, which a micro-batch multiplies. A static trace runs once, and is divided by its batch where the operator
depends on the batch's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from autoplan.layers.facts import Facts, module_path
from autoplan.layers.measure import Sample, run_layer
from autoplan.layers.operators import EITHER, dtype_name, operator_kind, operator_label, operator_name
from autoplan.layers.types import Gemm, Operator, OperatorKind

_SMALL, _LARGE = 2, 3
_THROUGH = frozenset(("view", "elementwise", "copy"))  # between the products and the softmax of an attention core
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A kind's operators, and what only all layers together can settle.

    ``owner``, ``saved_inputs`` as in :class:`Run`; ``pending_bytes[i]``: what the storage of node i adds to its owner's
    saved bytes if another layer keeps it (0 where it is counted already).
    """

    operators: tuple[Operator, ...]
    owner: tuple[int | None, ...]
    pending_bytes: tuple[float, ...]
    saved_inputs: frozenset[int]


def measure_kind(
    facts: Facts, nodes: Sequence[Node], boundary: Sequence[Node], *, batched: frozenset[Node] | None, batch: int
) -> Measured:
    """Measure the layer ``nodes``. ``batched``: None for a dynamic trace, else the nodes that depend on the batch's
    tensors, and ``batch`` is the traced size."""
    scales: Sequence[_Affine | _Divided]
    if batched is None:
        small = run_layer(facts, nodes, boundary, batch=_SMALL)
        large = run_layer(facts, nodes, boundary, batch=_LARGE)
        scales = [
            _Affine(one.elements != other.elements) for one, other in zip(small.samples, large.samples, strict=True)
        ]
    else:
        small = large = run_layer(facts, nodes, boundary, batch=batch)
        scales = [_Divided(node in batched, batch) for node in nodes]
    core = _attention_cores(nodes)
    operators = tuple(
        _operator(node, scale, one, other, core=node in core)
        for node, scale, one, other in zip(nodes, scales, small.samples, large.samples, strict=True)
    )
    pending = []
    for index, owner in enumerate(small.owner):
        counted = small.is_saved[index] or owner is None or owner < 0
        scale = scales[owner] if owner is not None and owner >= 0 else scales[index]
        sizes = small.storage_bytes[index], large.storage_bytes[index]
        pending.append(0.0 if counted else scale.per_sample(*sizes))
    return Measured(
        operators=operators, owner=small.owner, pending_bytes=tuple(pending), saved_inputs=small.saved_inputs
    )


def with_saved(operators: Sequence[Operator], extra: Mapping[int, float]) -> tuple[Operator, ...]:
    """Operators with bytes added that other layers keep of their outputs."""
    return tuple(
        replace(operator, saved_bytes=operator.saved_bytes + extra[index]) if extra.get(index) else operator
        for index, operator in enumerate(operators)
    )


@dataclass(frozen=True, slots=True)
class _Affine:
    """Two runs, at 2 and 3 samples."""

    batched: bool

    def one(self, small: float, large: float) -> float:
        return small - (_SMALL - 1) * (large - small)

    def per_sample(self, small: float, large: float) -> float:
        return large - small if self.batched else small

    def size(self, small: int, large: int) -> int:
        return large - small if small != large else small


@dataclass(frozen=True, slots=True)
class _Divided:
    """One run at the traced batch."""

    batched: bool
    batch: int

    def one(self, small: float, large: float) -> float:
        return small / self.batch if self.batched else small

    per_sample = one


def _gemm(scale: _Affine | _Divided, small: Gemm, large: Gemm) -> Gemm:
    """The product of one sample: the dimension that grows with the batch, divided by it."""
    if isinstance(scale, _Divided):
        if not scale.batched:
            return small
        by_groups = small.groups > 1 and small.groups % scale.batch == 0
        if by_groups:
            return replace(small, groups=small.groups // scale.batch, batch_in_groups=True)
        return replace(small, m=max(1, small.m // scale.batch))
    return Gemm(
        m=scale.size(small.m, large.m),
        n=scale.size(small.n, large.n),
        k=scale.size(small.k, large.k),
        groups=scale.size(small.groups, large.groups),
        batch_in_groups=small.groups != large.groups,
    )


def _operator(node: Node, scale: _Affine | _Divided, small: Sample, large: Sample, *, core: bool) -> Operator:
    gemm = _gemm(scale, small.work.gemm, large.work.gemm) if small.work.gemm and large.work.gemm else None
    return Operator(
        name=node.name,
        target=operator_label(node.target),
        kind=_kind(node, small),
        dtype=dtype_name(small.dtype) if small.dtype is not None else "int64",
        batched=scale.batched,
        flops=max(0.0, scale.one(small.work.flops, large.work.flops)),
        backward_flops=max(0.0, scale.one(small.work.backward_flops, large.work.backward_flops)),
        read_bytes=max(0.0, scale.one(small.read_bytes, large.read_bytes)),
        written_bytes=max(0.0, scale.one(small.written_bytes, large.written_bytes)),
        parameter_bytes=small.parameter_bytes,
        saved_bytes=max(0.0, scale.per_sample(small.saved_bytes, large.saved_bytes)),
        core=core,
        needs_backward=small.needs_backward,
        gemm=gemm,
        attention=small.work.attention,
        module_path=module_path(node),
        source=_source(node),
    )


def _kind(node: Node, sample: Sample) -> OperatorKind:
    kind = operator_kind(node.target)
    if operator_name(node.target) in EITHER and sample.makes_new:
        return "copy"
    return kind


def _source(node: Node) -> str:
    """``file:line`` of the user's code that called the operator."""
    lines = _USER_LINE.findall(node.meta.get("stack_trace") or "")
    return ":".join(lines[-1]) if lines else ""


def _attention_cores(nodes: Sequence[Node]) -> frozenset[Node]:
    """Fused attention; and softmax with the products around it, and all between them."""
    inner = set(nodes)
    core = {node for node in nodes if operator_kind(node.target) == "attention"}
    for node in nodes:
        if operator_kind(node.target) == "softmax" and "log" not in operator_name(node.target):
            above = _path_to_product(node, inner, lambda each: each.all_input_nodes)
            below = _path_to_product(node, inner, lambda each: each.users)
            if above and below:
                core |= {node, *above, *below}
    return frozenset(core)


def _path_to_product(start: Node, inner: set[Node], neighbours: object) -> list[Node]:
    """Nodes from ``start`` to the nearest product of two activations, through cheap operators only; [] if none."""
    assert callable(neighbours)
    came: dict[Node, Node] = {}
    queue = [start]
    for node in queue:
        for other in neighbours(node):
            if other not in inner or other in came:
                continue
            came[other] = node
            if _is_activation_product(other):
                return list(_walk_back(other, came, start))
            if operator_kind(other.target) in _THROUGH:
                queue.append(other)
    return []


def _walk_back(node: Node, came: Mapping[Node, Node], start: Node) -> Iterable[Node]:
    while node is not start:
        yield node
        node = came[node]


def _is_activation_product(node: Node) -> bool:
    if operator_name(node.target) not in ("matmul", "bmm", "baddbmm", "einsum"):
        return False
    return sum(source.op == "call_function" for source in node.all_input_nodes) >= 2

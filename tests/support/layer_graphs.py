"""Layer graphs typed by hand: chains of dense layers whose time and memory are one number each.

A layer multiplies (``flops`` forward, twice that backward) and keeps ``saved`` bytes a sample, of which ``core`` are
what selective recompute drops; under a tensor degree all of it is divided and two all-reduces appear."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.cluster import Cluster, Device, Link
from autoplan.errors import StrategyError
from autoplan.layers.types import Collective, Edge, Layer, LayerGraph, LayerKind, Operator, Parameter
from autoplan.search import Problem

GIB = float(2**30)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One kind of layer, per sample."""

    flops: float = 1e12
    elements: int = 10_000_000
    saved: float = 64 * 2**20
    core: float = 0.0
    core_flops: float = 0.0
    input: float = 2**20
    shared: str = ""
    trainable: bool = True

    def kind(self, tensor: int = 1) -> LayerKind:
        """As one rank of ``tensor`` holds it."""
        operators = (_operator("mix", self.core_flops, self.core, tensor, core=True),) if self.core else ()
        collectives = tuple(
            Collective(name="all_reduce", phase=phase, bytes_per_sample=self.input) for phase in ("forward", "backward")
        )
        parameter = Parameter(
            role="weight",
            elements=self.elements // tensor,
            element_bytes=2,
            shared=self.shared,
            trainable=self.trainable,
        )
        return LayerKind(
            operators=(*operators, _operator("multiply", self.flops, self.saved, tensor)),
            parameters=(parameter,),
            collectives=collectives if tensor > 1 else (),
            input_bytes=self.input,
        )


def _operator(name: str, flops: float, saved: float, tensor: int, *, core: bool = False) -> Operator:
    return Operator(
        name=name,
        target="aten::mm",
        kind="gemm",
        dtype="bf16",
        flops=flops / tensor,
        backward_flops=2 * flops / tensor,
        read_bytes=2.0**16,
        written_bytes=2.0**16,
        saved_bytes=saved / tensor,
        core=core,
    )


def graph(layers: Sequence[Dense], *, crossing: float = 2**20, name: str = "chain") -> LayerGraph:
    """A chain of ``layers``; equal ones are one kind; ``crossing`` bytes a sample go from each to the next."""
    distinct = list(dict.fromkeys(layers))
    return LayerGraph(
        name=name,
        layers=tuple(Layer(name=f"layers.{i}", kind=distinct.index(d), nodes=()) for i, d in enumerate(layers)),
        kinds=tuple(d.kind() for d in distinct),
        edges=tuple(
            Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=float(crossing))
            for i in range(len(layers) - 1)
        ),
        layer_digests=tuple(hashlib.sha256(repr(d).encode()).hexdigest()[:12] for d in layers),
        tokens_per_sample=1,
        dtype="bf16",
        fingerprint=f"{name}-{len(layers)}",
    )


def tensor_kinds(layers: Sequence[Dense], *, most: int = 64) -> Callable[[int], tuple[LayerKind, ...]]:
    """The kinds under a tensor degree; degrees above ``most``, or that don't divide it, are illegal."""

    def kinds(degree: int) -> tuple[LayerKind, ...]:
        if most % degree:
            raise StrategyError(f"{most} heads are not divisible by tensor {degree}")
        return tuple(d.kind(degree) for d in dict.fromkeys(layers))

    return kinds


def cluster(
    gpus: int = 8,
    *,
    nodes: int = 1,
    memory_gib: float = 16.0,
    intra: float = 200e9,
    inter: float = 25e9,
    context_bytes: float = 0.0,
) -> Cluster:
    """``nodes`` x ``gpus`` devices of 100 TFLOP/s with nothing in their memory but what the plan puts there."""
    device = Device(
        name="card",
        sms=100,
        peak_flops={"bf16": 100e12, "fp32": 50e12},
        memory_bytes=memory_gib * GIB,
        memory_bytes_per_s=1e12,
        launch_s=1e-6,
        context_bytes=context_bytes,
    )
    return Cluster(
        device=device,
        nodes=nodes,
        gpus_per_node=gpus,
        intra=Link(name="near", bytes_per_s=intra, latency_s=2e-6),
        inter=Link(name="far", bytes_per_s=inter, latency_s=5e-6),
        spec=f"{nodes}x{gpus}xcard" if nodes > 1 else f"{gpus}xcard",
    )


def problem(layers: Sequence[Dense], machines: Cluster, *, global_batch: int = 32, **more: Any) -> Problem:
    """A planning question about a chain of ``layers``."""
    crossing = more.pop("crossing", 2**20)
    most = more.pop("heads", 64)
    return Problem(
        layers=graph(layers, crossing=crossing),
        tensor_kinds=tensor_kinds(layers, most=most),
        cluster=machines,
        global_batch=global_batch,
        precision="bf16",
        **more,
    )

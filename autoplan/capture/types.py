"""What capture hands on: one fx graph that ends in the scalar loss, and what was learnt while tracing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor of the user's batch.

    ``placeholder`` is the graph's name for it; ``path`` says where it stands in the batch: ``("input_ids",)`` in a
    dict, ``(0,)`` in a tuple, ``()`` when the batch is one tensor. ``batched``: dimension 0 is the batch.
    """

    placeholder: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """loss = sum over terms of ``coefficient`` x term; ``node`` is the fx node of the term (a scalar).

    ``reduction`` "mean": node averages over ``weight``-many things, so its parts are weighted by how many each part
    has; "sum": parts add; "constant": depends on no input (a regulariser, or a number in the code: ``node`` is then
    what adds it), so every part repeats it; "total": a sum of the inputs alone that the model or the loss divides by
    (``mask.sum()``, the batch size); it is no summand itself (``coefficient`` 0), but is needed of the whole batch.
    ``weight`` says what a mean counts: "elements" of the operand, or "targets" that are not ``ignore_index``
    (with class weights: the sum of their weights); "node": of a total, the value of the node in each part.
    ``coefficient``: the plain numbers that the term is multiplied by; tensors of the model among them count as 1.
    """

    node: str
    reduction: Literal["mean", "sum", "constant", "total"]
    weight: Literal["elements", "targets", "none", "node"]
    coefficient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """A place where samples of a batch meet (batch statistics, a contrastive loss), so that splitting the batch would
    change the numbers."""

    operator: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A model as one graph.

    ``graph_module``: placeholders are the batch's tensors in the order of ``inputs``; parameters and buffers are
    get_attr nodes and the very objects of the user's model under the user's names; it returns the scalar loss. Each
    node keeps ``meta["val"]``, ``meta["nn_module_stack"]`` and ``meta["stack_trace"]``, and one that the model itself
    recomputes ``meta["checkpointed"]``, the line that asks for it.
    ``tied``: groups of names that are one Parameter, the first of each is the one that counts.
    ``batch_size``: of the example. ``dynamic_batch``: the graph runs at any batch, else only at ``batch_size``.
    ``couplings`` empty: the batch may be split over data ranks and micro-batches.
    ``constants``: what the example holds beside tensors, by path; it is part of the program.
    """

    name: str
    graph_module: GraphModule
    inputs: tuple[InputSpec, ...]
    batch_size: int
    dynamic_batch: bool
    tokens_per_sample: int
    dtype: torch.dtype
    tied: tuple[tuple[str, ...], ...]
    loss_terms: tuple[LossTerm, ...]
    couplings: tuple[Coupling, ...]
    notes: tuple[str, ...]
    constants: tuple[tuple[tuple[str | int, ...], object], ...] = ()

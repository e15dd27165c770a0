"""Peak memory of one GPU of a pipeline stage, by term.

Two moments of a step can be the peak, and the larger one's terms are the answer:

- *backward* of the oldest micro-batch in steady state: states, saved activations of every micro-batch in flight
  (min(M, S - s) for 1F1B), the window that recomputing a layer opens, and what the widest operator moves;
- *step*: states and the optimizer's temporaries, no activations.

The moments around them (init, load, forward, save) and the host's memory: :mod:`autoplan.cost_models.timeline`.

State by ZeRO stage over the n ranks of the data and context axes (Rajbhandari et al. 2020, figure 1): 1 divides
optimizer state and master weights, 2 gradients too, 3 weights too; what is gathered or not yet scattered is a window
of its own. Recompute (Korthikanti et al. 2022): *full* keeps a layer's inputs, *selective* everything but the attention
core. A context axis leaves each rank its share of every sample's tokens, attention's scores (own queries, all keys)
included. Of an expert there are n / expert copies, and that is what its state divides by.

Every term is bytes, all terms are always there (0 where they don't apply), and they sum to the peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan import schedules
from autoplan.cluster import Device
from autoplan.cost_models.precision import dtype_bytes
from autoplan.cost_models.recipes import Recipe, recipe
from autoplan.plan import Strategy

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind, Operator

__all__ = [
    "Recipe",
    "recipe",
    "stage_memory",
    "stage_parts",
    "StageParts",
    "measured_bytes",
    "layer_saved_bytes",
    "micro_batches_in_flight",
    "Elements",
    "count_elements",
]

RECOMPUTE = ("none", "selective", "full")
# How a peak is read: off the device as nvidia-smi does it (everything), or from torch's allocator: memory it holds
# (torch.cuda.max_memory_reserved) or has handed out (max_memory_allocated). NCCL allocates outside of it.
CONVENTIONS = ("nvidia-smi", "reserved", "allocated")
# Rounding to 512 bytes and blocks that no later request fits. Reserved minus allocated at the peak was 3 to 6% of
# what comes and goes in PyTorch's memory snapshots of transformer training; states are allocated once and don't count.
ALLOCATOR_RESERVE = 0.05
# cuBLAS and cuBLASLt workspaces, one of each for forward's and autograd's stream (32 MiB on Hopper, 8 before).
WORKSPACE_BYTES = 64 * 2**20
# NCCL: 16 to 24 channels x (4 MiB Simple + 0.6 LL128 + LL) buffers x directions, and its own state, a communicator.
COMMUNICATOR_BYTES = 300 * 2**20
# Flat buckets that gradients are reduced in: 25 MiB by default in DDP, two in flight.
BUCKET_BYTES = 50 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Parameter elements on one tensor rank: all, those that train, of the largest layer, and the most that train in
    one layer. ``expert`` of the total and ``trainable_expert`` of the trainable ones are of experts."""

    total: int
    trainable: int
    largest_layer: int
    largest_trainable: int = 0
    expert: int = 0
    trainable_expert: int = 0


def count_elements(kinds: Sequence[LayerKind]) -> Elements:
    """Elements of a stage's layers; parameters of one tied group are counted once."""
    seen: set[str] = set()
    total = trainable = largest = largest_trainable = expert = trainable_expert = 0
    for kind in kinds:
        layer = trains = 0
        for parameter in kind.parameters:
            if parameter.shared and parameter.shared in seen:
                continue
            seen.add(parameter.shared)
            trained = parameter.elements if parameter.trainable else 0
            layer += parameter.elements
            trains += trained
            expert += parameter.elements if parameter.expert else 0
            trainable_expert += trained if parameter.expert else 0
        total += layer
        trainable += trains
        largest, largest_trainable = max(largest, layer), max(largest_trainable, trains)
    return Elements(
        total=total,
        trainable=trainable,
        largest_layer=largest,
        largest_trainable=largest_trainable,
        expert=expert,
        trainable_expert=trainable_expert,
    )


def layer_saved_bytes(kind: LayerKind, *, policy: str, samples: float) -> float:
    """Bytes that one micro-batch of ``samples`` leaves behind in a layer for its backward, under a recompute policy.

    What the runtime really frees: of a fused core its row sums alone, because the projection keeps the core's output;
    and a normalisation over the batch updates its statistics once, so it stays out of what runs again, which is cut in
    two there: its input and its output are kept.
    """
    if policy == "full":
        around = (op for op in kind.operators if "batch_norm" in op.target)
        return kind.input_bytes * samples + sum(_scaled(op, op.read_bytes + op.written_bytes, samples) for op in around)
    kept = 0.0
    for op in kind.operators:
        saved = op.saved_bytes
        if policy == "selective" and op.core:
            saved = min(saved, _output_bytes(op))
        kept += _scaled(op, saved, samples)
    return kept


def _output_bytes(op: Operator) -> float:
    """Of one sample's fused attention; 0 for a core by hand, whose last product is copied before it is projected."""
    if op.attention is None:
        return 0.0
    return op.attention.heads * op.attention.query_length * op.attention.value_dim * dtype_bytes(op.dtype)


def stage_memory(
    kinds_of_stage: Sequence[LayerKind],
    *,
    strategy: Strategy,
    stage: int,
    recipe: Recipe,
    device: Device,
    recompute: Sequence[str],
    shared_elements: int = 0,
    received_bytes: float = 0.0,
    in_flight: Sequence[int] | None = None,
    put_aside_bytes: float = 0.0,
) -> dict[str, float]:
    """Bytes by term on the worst GPU of stage ``stage`` (0-based); ``recompute`` has a policy for each layer.

    ``kinds_of_stage`` are the layers as one tensor rank holds them. ``shared_elements`` are parameters that the stage
    keeps a copy of beside its layers' own (a tied embedding on the last stage). ``received_bytes`` a micro-batch are
    kept of what earlier stages send, beyond what the layers count (a skip's other end). ``in_flight``: the
    micro-batches held of each layer, where that is not what the schedule says of even chunks; ``put_aside_bytes``: what
    is held for weight gradients that come later.
    """
    parts = stage_parts(
        kinds_of_stage,
        strategy=strategy,
        stage=stage,
        recipe=recipe,
        device=device,
        recompute=recompute,
        shared_elements=shared_elements,
        received_bytes=received_bytes,
        in_flight=in_flight,
        put_aside_bytes=put_aside_bytes,
    )
    backward, step = parts.backward, parts.step
    moment, other = (backward, step) if sum(backward.values()) >= sum(step.values()) else (step, backward)
    return dict.fromkeys(other, 0.0) | parts.at(parts.states, moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """Bytes by term: what stays (``states``, ``fixed``) and what comes and goes in the backward and in the step.
    ``reserve`` is the allocator's share of what comes and goes."""

    states: dict[str, float]
    fixed: dict[str, float]
    backward: dict[str, float]
    step: dict[str, float]
    reserve: float

    def at(self, states: Mapping[str, float], moment: Mapping[str, float]) -> dict[str, float]:
        """All terms of one moment."""
        reserve = self.reserve * sum(moment.values())
        return {**states, **moment, **self.fixed, "allocator_reserve": reserve}


def stage_parts(
    kinds_of_stage: Sequence[LayerKind],
    *,
    strategy: Strategy,
    stage: int,
    recipe: Recipe,
    device: Device,
    recompute: Sequence[str],
    shared_elements: int = 0,
    received_bytes: float = 0.0,
    in_flight: Sequence[int] | None = None,
    put_aside_bytes: float = 0.0,
) -> StageParts:
    """The terms that :func:`stage_memory` chooses from; same arguments."""
    elements = count_elements(kinds_of_stage)
    return StageParts(
        states=_states(elements, shared_elements, strategy, recipe),
        fixed={
            "communication_buffers": _communication_bytes(strategy),
            "workspace": 0.0 if device.is_cpu else float(WORKSPACE_BYTES),
            "context": device.context_bytes,
        },
        backward=_backward_terms(
            kinds_of_stage,
            strategy,
            in_flight or micro_batches_in_flight(strategy, stage, layers=len(kinds_of_stage)),
            recompute,
            received_bytes,
        )
        | _windows(elements, strategy, recipe)
        | ({"weight_gradient_inputs": put_aside_bytes} if put_aside_bytes else {}),
        step={"optimizer_temporary": _step_temporary(elements, shared_elements, strategy, recipe)},
        reserve=0.0 if device.is_cpu else ALLOCATOR_RESERVE,
    )


def measured_bytes(terms: Mapping[str, float], convention: str, *, strategy: Strategy) -> float:
    """The part of a peak's ``terms`` that one of :data:`CONVENTIONS` shows, in bytes."""
    total = sum(terms.values())
    if convention == "nvidia-smi":
        return total
    total -= terms["context"] + _communicator_bytes(strategy)
    return total - terms["allocator_reserve"] if convention == "allocated" else total


def micro_batches_in_flight(strategy: Strategy, stage: int, *, layers: int) -> tuple[int, ...]:
    """Micro-batches whose activations stage ``stage`` holds at once, of each of its ``layers``.

    With v virtual stages a stage warms up with 2 (p - s - 1) + (v - 1) p + 1 chunks of a v-th of its layers, p
    micro-batches a chunk before the next one (Narayanan et al. 2021, section 2.2). That is p (1 + (p - 1) / (p v)) of
    the whole first stage (Korthikanti et al. 2022, section 4.3). Layers that don't divide evenly are taken as the first
    chunk's on the first stage (an embedding) and the last chunk's elsewhere (a head).
    """
    stages, virtual, count = strategy.pipeline, strategy.virtual_stages, strategy.micro_batches
    if virtual == 1 or strategy.schedule == "gpipe":
        held = schedules.in_flight(strategy.schedule, stage=stage, stages=stages, micro_batches=count)
        return (held,) * layers
    warm_up = min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, virtual * count)
    chunks = [0] * virtual
    for position in range(warm_up):
        chunks[position // min(stages, count) % virtual] += 1
    size = max(1, layers // virtual)
    extra = layers - size * virtual if stage == 0 else 0
    return tuple(chunks[min(max(0, layer - extra) // size, virtual - 1)] for layer in range(layers))


def _sharers(strategy: Strategy) -> int:
    """Ranks that hold the same weights and so can share state: those of the data and of the context axis."""
    return strategy.data * strategy.context


def _states(elements: Elements, extra: int, strategy: Strategy, recipe: Recipe) -> dict[str, float]:
    zero = strategy.zero_stage
    trainable = _shared(elements.trainable + extra, elements.trainable_expert, strategy)
    weights = _shared(elements.total + extra, elements.expert, strategy)
    return {
        "weights": recipe.weights * (weights if zero >= 3 else elements.total + extra),
        "gradients": recipe.gradients * (trainable if zero >= 2 else elements.trainable + extra),
        "master_weights": recipe.master_weights * (trainable if zero >= 1 else elements.trainable + extra),
        "optimizer_state": recipe.optimizer_state * (trainable if zero >= 1 else elements.trainable + extra),
    }


def _shared(elements: int, expert: int, strategy: Strategy) -> float:
    """Elements that one rank keeps of what it shares; an expert has fewer copies to share with."""
    copies = max(1, _sharers(strategy) // strategy.expert)
    return (elements - expert) / _sharers(strategy) + expert / copies


def _windows(elements: Elements, strategy: Strategy, recipe: Recipe) -> dict[str, float]:
    """Unsharded pieces that live for a moment: ZeRO-3 holds the layer that runs and the one prefetched; ZeRO-2 and 3
    the gradients of the layer that just ran, before they are scattered."""
    zero = strategy.zero_stage if _sharers(strategy) > 1 else 0
    return {
        "gradient_window": elements.largest_trainable * recipe.gradients if zero >= 2 else 0.0,
        "gather_window": 2 * elements.largest_layer * recipe.weights if zero >= 3 else 0.0,
    }


def _backward_terms(
    kinds: Sequence[LayerKind],
    strategy: Strategy,
    held: Sequence[int],
    recompute: Sequence[str],
    received_bytes: float,
) -> dict[str, float]:
    samples = strategy.micro_batch_size / strategy.context
    saved = window = widest = 0.0
    known: dict[tuple[int, str], tuple[float, float, float]] = {}  # layers of one kind are one object
    for kind, policy, in_flight in zip(kinds, recompute, held, strict=True):
        key = (id(kind), policy)
        if key not in known:
            kept = layer_saved_bytes(kind, policy=policy, samples=samples)
            again = layer_saved_bytes(kind, policy="none", samples=samples) - kept
            known[key] = kept, again, max((_passing_bytes(op, samples) for op in kind.operators), default=0.0)
        kept, again, passing = known[key]
        saved += kept * in_flight
        window, widest = max(window, again), max(widest, passing)
    return {
        "saved_activations": saved,
        "received_activations": received_bytes * max(held, default=0),
        "recompute_window": window,
        "passing_activations": widest,
    }


def _passing_bytes(op: Operator, samples: float) -> float:
    """The gradients of an operator's output and inputs, alive while its backward runs."""
    if op.kind in ("view", "embedding") or not op.needs_backward:
        return 0.0
    return _scaled(op, op.read_bytes + op.written_bytes, samples)


def _step_temporary(elements: Elements, extra: int, strategy: Strategy, recipe: Recipe) -> float:
    trainable = elements.trainable + extra
    kept = _shared(trainable, elements.trainable_expert, strategy) if strategy.zero_stage >= 1 else trainable
    return kept * recipe.step_temporary


def _communication_bytes(strategy: Strategy) -> float:
    buckets = BUCKET_BYTES if _sharers(strategy) > 1 else 0
    return _communicator_bytes(strategy) + buckets


def _communicator_bytes(strategy: Strategy) -> float:
    axes = sum(degree > 1 for degree in (strategy.data, strategy.tensor, strategy.pipeline, strategy.context))
    return float(axes * COMMUNICATOR_BYTES)


def _scaled(op: Operator, bytes_: float, samples: float) -> float:
    return bytes_ * (samples if op.batched else 1)

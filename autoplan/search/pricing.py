"""What one layer of each kind costs under a tensor degree and a micro-batch size, asked of the cost models once.

Activation terms are *probed*: a stage of one layer with a recipe that keeps no state is priced by the very
:func:`autoplan.cost_models.memory.stage_memory` that prices the final plan, so no formula is written twice. The same
goes for states: bytes a parameter come from a layer of 2^20 parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autoplan.cluster import Cluster, Device
from autoplan.cost_models import communication, compute, memory
from autoplan.cost_models.memory import Recipe, stage_memory
from autoplan.cost_models.piecewise import at_values as at_values
from autoplan.layers.types import LayerKind, Parameter
from autoplan.plan import Strategy

_NO_STATE = Recipe(name="no state", weights=0.0, gradients=0.0, master_weights=0.0, optimizer_state=0.0)
_PROBE_ELEMENTS = 2**20
_MANY = 2**40
_STATES = ("weights", "gradients", "master_weights", "optimizer_state")
_FIXED = ("communication_buffers", "workspace", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCosts:
    """Seconds and bytes of one micro-batch through one layer of a kind, on one GPU.

    ``forward_s``/``backward_s`` are operators, ``tensor_forward_s``/``tensor_backward_s`` collectives of the tensor
    axis. By recompute policy: ``extra_s`` is added to the backward, ``saved_bytes`` are kept for it, ``window_bytes``
    come back while it runs. ``passing_bytes``: what the widest operator moves.
    """

    forward_s: float
    backward_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    extra_s: dict[str, float]
    saved_bytes: dict[str, float]
    window_bytes: dict[str, float]
    passing_bytes: float
    elements: int
    trainable: int

    @property
    def period_s(self) -> float:
        """One forward and one backward without recompute."""
        return self.forward_s + self.backward_s + self.tensor_forward_s + self.tensor_backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a layer of a kind leaves for its backward, for any micro-batch of m samples. By recompute policy (a, b):
    a + b m bytes saved. ``passing``: the widest operator moves max(first, second m)."""

    saved: dict[str, tuple[float, float]]
    passing: tuple[float, float]

    def saved_bytes(self, policy: str, micro_batch: int) -> float:
        fixed, each = self.saved[policy]
        return fixed + each * micro_batch

    def passing_bytes(self, micro_batch: int) -> float:
        return max(self.passing[0], self.passing[1] * micro_batch)


def activations(kind: LayerKind, device: Device) -> Activations:
    """Probe the memory model with one sample, with two, and with so many that nothing else counts."""
    one, two, many = (_activations(kind, device, size, "none") for size in (1, 2, _MANY))
    probes = {"none": (one, two)}
    for policy in memory.RECOMPUTE:
        if policy not in probes:
            probes[policy] = _activations(kind, device, 1, policy), _activations(kind, device, 2, policy)
    saved = {p: (first["saved_activations"], second["saved_activations"]) for p, (first, second) in probes.items()}
    return Activations(
        saved={policy: (2 * first - second, second - first) for policy, (first, second) in saved.items()},
        passing=(one["passing_activations"], many["passing_activations"] / _MANY),
    )


def kind_costs(
    kind: LayerKind, cluster: Cluster, *, tensor: int, micro_batch: int, kept: Activations | None = None
) -> KindCosts:
    """Price ``kind``, whose operators and parameters are already those of one tensor rank; ``kept``: its
    :func:`activations`, where they are known."""
    operators = compute.layer_time(kind, cluster.device, micro_batch=micro_batch)
    collectives = communication.tensor_time(kind, cluster, degree=tensor, micro_batch=micro_batch)
    kept = kept or activations(kind, cluster.device)
    saved = {policy: kept.saved_bytes(policy, micro_batch) for policy in memory.RECOMPUTE}
    selective = compute.recompute_s(kind, cluster.device, micro_batch=micro_batch, policy="selective")
    return KindCosts(
        forward_s=operators.forward_s,
        backward_s=operators.backward_s,
        tensor_forward_s=collectives.forward_s,
        tensor_backward_s=collectives.backward_s,
        # The whole forward runs again, its collectives too.
        extra_s={"none": 0.0, "selective": selective, "full": operators.forward_s + collectives.forward_s},
        saved_bytes=saved,
        window_bytes={policy: max(0.0, saved["none"] - bytes_) for policy, bytes_ in saved.items()},
        passing_bytes=kept.passing_bytes(micro_batch),
        elements=sum(p.elements for p in kind.parameters),
        trainable=sum(p.elements for p in kind.parameters if p.trainable),
    )


def _activations(kind: LayerKind, device: Device, micro_batch: int, policy: str) -> dict[str, float]:
    return stage_memory(
        [kind],
        strategy=Strategy(micro_batch_size=micro_batch),
        stage=0,
        recipe=_NO_STATE,
        device=device,
        recompute=[policy],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Bytes of state for one parameter element under a strategy, and what is there whatever the layers.

    A stage of E elements, F of them trainable, the largest layer with G, holds ``per_element * E + per_trainable * F``;
    the backward adds ``window_per_element * G``, the step ``temporary_per_trainable * F``. Both moments grow by
    ``reserve`` for the allocator.
    """

    per_element: float
    per_trainable: float
    window_per_element: float
    temporary_per_trainable: float
    fixed_bytes: float
    reserve: float


def state_costs(strategy: Strategy, recipe: Recipe, device: Device) -> StateCosts:
    """Probe the memory model for ``strategy`` (only its degrees and ZeRO stage matter here)."""

    def probe(trainable: bool, with_recipe: Recipe) -> dict[str, float]:
        kind = LayerKind(
            operators=(),
            parameters=(Parameter(role="probe", elements=_PROBE_ELEMENTS, element_bytes=1, trainable=trainable),),
        )
        return stage_memory([kind], strategy=strategy, stage=0, recipe=with_recipe, device=device, recompute=["none"])

    frozen = probe(False, dataclasses.replace(recipe, step_temporary=0.0))
    trained = probe(True, dataclasses.replace(recipe, step_temporary=0.0))
    only_temporary = dataclasses.replace(_NO_STATE, step_temporary=recipe.step_temporary)
    windows = trained.get("gradient_window", 0.0) + trained.get("gather_window", 0.0)
    per_element = sum(frozen[name] for name in _STATES) / _PROBE_ELEMENTS
    return StateCosts(
        per_element=per_element,
        per_trainable=sum(trained[name] for name in _STATES) / _PROBE_ELEMENTS - per_element,
        window_per_element=windows / _PROBE_ELEMENTS,
        temporary_per_trainable=probe(True, only_temporary).get("optimizer_temporary", 0.0) / _PROBE_ELEMENTS,
        fixed_bytes=sum(frozen[name] for name in _FIXED),
        reserve=0.0 if device.is_cpu else memory.ALLOCATOR_RESERVE,
    )

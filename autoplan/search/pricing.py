"""What one layer of each kind costs under a tensor degree and a micro-batch size, asked of the cost models once.

Activation terms are *probed*: they are those of :mod:`autoplan.cost_models.memory`, that price the final plan, for one
sample and for two, so no formula is written twice. The same goes for states: bytes a parameter come from a layer of
2^20 parameters. Kinds that differ in sizes alone (a model without repetition has hundreds) are priced at once: the cost
models' formulas take arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster, Device
from autoplan.cost_models import communication, compute, memory
from autoplan.cost_models.memory import Recipe, layer_saved_bytes, stage_memory
from autoplan.cost_models.piecewise import at_values as at_values
from autoplan.cost_models.software import EAGER, Software
from autoplan.cost_models.weight_gradients import is_put_off, weight_gradient_s
from autoplan.layers.types import LayerKind, Operator, Parameter
from autoplan.plan import Strategy

Floats = NDArray[np.float64]

_NO_STATE = Recipe(name="no state", weights=0.0, gradients=0.0, master_weights=0.0, optimizer_state=0.0)
_PROBE_ELEMENTS = 2**20
_MANY = 2**40
_STATES = ("weights", "gradients", "master_weights", "optimizer_state")
_FIXED = ("communication_buffers", "workspace", "context")
# Kinds that are alike but for sizes are priced at once from so many on; fewer are quicker one by one.
_LEAST_STACKED = 8
_SIZES = ("flops", "backward_flops", "read_bytes", "written_bytes", "parameter_bytes", "saved_bytes")


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
class Seconds:
    """[K] the times of :class:`KindCosts`, a kind each."""

    forward_s: Floats
    backward_s: Floats
    tensor_forward_s: Floats
    tensor_backward_s: Floats
    extra_s: dict[str, Floats]

    @property
    def period_s(self) -> Floats:
        """One forward and one backward without recompute."""
        return self.forward_s + self.backward_s + self.tensor_forward_s + self.tensor_backward_s


@dataclass(frozen=True, kw_only=True)
class Kept:
    """[K] the bytes of :class:`KindCosts`, a kind each; ``whole_bytes``: of a layer that recomputes nothing."""

    saved_bytes: dict[str, Floats]
    whole_bytes: Floats
    passing_bytes: Floats
    elements: Floats
    trainable: Floats

    @cached_property
    def window_bytes(self) -> dict[str, Floats]:
        """By recompute policy what comes back while a layer's backward runs."""
        return {policy: np.maximum(0.0, self.whole_bytes - bytes_) for policy, bytes_ in self.saved_bytes.items()}


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The layer kinds of one tensor degree, as one of its ranks has them, to be priced for any micro-batch."""

    kinds: tuple[LayerKind, ...]
    cluster: Cluster
    tensor: int
    software: Software = EAGER

    def kept(self, micro_batch: int) -> Kept:
        """Bytes of a micro-batch of so many samples."""
        saved, (passing, passing_each) = self._activations
        of_policy = {policy: fixed + each * micro_batch for policy, (fixed, each) in saved.items()}
        return Kept(
            saved_bytes={policy: self._asked(policy, of_policy) for policy in of_policy},
            whole_bytes=of_policy["none"],
            passing_bytes=np.maximum(passing, passing_each * micro_batch),
            elements=self._elements[0],
            trainable=self._elements[1],
        )

    def seconds(self, micro_batch: int) -> Seconds:
        """Seconds of a micro-batch of so many samples."""
        forward, backward, selective = (np.zeros(len(self.kinds)) for _ in range(3))
        device, software = self.cluster.device, self.software
        for positions, kind in self._stacks:
            operators = compute.layer_time(kind, device, micro_batch=micro_batch, software=software)
            forward[positions], backward[positions] = operators.forward_s, operators.backward_s
            selective[positions] = compute.recompute_s(
                kind, device, micro_batch=micro_batch, policy="selective", software=software
            )
        which, different = self._collectives
        collectives = [
            communication.tensor_time(
                kind, self.cluster, degree=self.tensor, micro_batch=micro_batch, software=software
            )
            for kind in different
        ]
        tensor_forward = np.array([time.forward_s for time in collectives])[which]
        # The whole forward runs again, its collectives too.
        extra = {"none": np.zeros(len(forward)), "selective": selective, "full": forward + tensor_forward}
        return Seconds(
            forward_s=forward,
            backward_s=backward,
            tensor_forward_s=tensor_forward,
            tensor_backward_s=np.array([time.backward_s for time in collectives])[which],
            extra_s={policy: self._asked(policy, extra) for policy in extra},
        )

    def _asked(self, chosen: str, by_policy: dict[str, Floats]) -> Floats:
        """[K] under the policy chosen, or under the one that the model itself asks for."""
        return np.where([kind.checkpointed for kind in self.kinds], by_policy["full"], by_policy[chosen])

    def weight_gradients_s(self, micro_batch: int) -> Floats:
        """[K] seconds of a micro-batch's backward that weights' gradients take."""
        found = np.zeros(len(self.kinds))
        for positions, kind in self._stacks:
            found[positions] = weight_gradient_s(
                kind, self.cluster.device, micro_batch=micro_batch, software=self.software
            )
        return found

    @cached_property
    def _elements(self) -> tuple[Floats, Floats]:
        """[K] parameter elements of a layer, and those that train."""
        total = [float(sum(p.elements for p in kind.parameters)) for kind in self.kinds]
        trained = [float(sum(p.elements for p in kind.parameters if p.trainable)) for kind in self.kinds]
        return np.array(total), np.array(trained)

    @cached_property
    def _activations(self) -> tuple[dict[str, tuple[Floats, Floats]], tuple[Floats, Floats]]:
        """[K] what layers leave for their backward: by recompute policy (a, b), a + b m bytes of m samples; and of
        (first, second) the widest operator moves max(first, second m): probed with so many that nothing else counts."""
        saved = {}
        for policy in memory.RECOMPUTE:
            one, two = (
                np.array([layer_saved_bytes(kind, policy=policy, samples=samples) for kind in self.kinds])
                for samples in (1.0, 2.0)
            )
            saved[policy] = 2 * one - two, two - one
        one, many = (
            np.array([_passing_bytes(kind, self.cluster.device, size) for kind in self.kinds]) for size in (1, _MANY)
        )
        return saved, (one, many / _MANY)

    @cached_property
    def _collectives(self) -> tuple[NDArray[np.int64], list[LayerKind]]:
        """[K] which of the different sets of collectives each kind has, and a kind with each."""
        number: dict[Any, int] = {}
        which = np.array([number.setdefault(kind.collectives, len(number)) for kind in self.kinds], dtype=np.int64)
        return which, [LayerKind(operators=(), collectives=collectives) for collectives in number]

    @cached_property
    def _stacks(self) -> list[tuple[list[int], LayerKind]]:
        """Kinds that differ in sizes alone as one whose sizes are arrays, with their positions; others one by one."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for position, kind in enumerate(self.kinds):
            alike.setdefault(tuple(map(_but_for_sizes, kind.operators)), []).append(position)
        found: list[tuple[list[int], LayerKind]] = []
        for positions in alike.values():
            if len(positions) < _LEAST_STACKED or self.cluster.device.is_cpu:
                found += [([position], self.kinds[position]) for position in positions]
            else:
                found.append((positions, _stacked([self.kinds[position] for position in positions])))
        return found


def _but_for_sizes(op: Operator) -> tuple[Any, ...]:
    """All that an operator's price depends on but its sizes, and which of those are 0."""
    products = op.gemm is not None and (True, op.gemm.batch_in_groups)
    needs = op.batched, op.core, op.needs_backward, op.flops > 0, op.backward_flops > 0, is_put_off(op)
    return op.kind, op.target, op.dtype, op.attention, products, *needs


def _stacked(kinds: Sequence[LayerKind]) -> LayerKind:
    """Kinds whose operators differ in sizes alone, as one with an array for every size."""
    operators = []
    for column in zip(*(kind.operators for kind in kinds), strict=True):
        sizes: dict[str, Any] = {name: np.array([getattr(op, name) for op in column]) for name in _SIZES}
        if column[0].gemm is not None:
            each: dict[str, Any] = {
                name: np.array([getattr(op.gemm, name) for op in column]) for name in ("m", "n", "k", "groups")
            }
            sizes["gemm"] = dataclasses.replace(column[0].gemm, **each)
        operators.append(dataclasses.replace(column[0], **sizes))
    return LayerKind(operators=tuple(operators))


def _passing_bytes(kind: LayerKind, device: Device, micro_batch: int) -> float:
    """What the widest operator of a layer moves."""
    return stage_memory(
        [kind],
        strategy=Strategy(micro_batch_size=micro_batch),
        stage=0,
        recipe=_NO_STATE,
        device=device,
        recompute=["none"],
    )["passing_activations"]


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

"""The memory of one GPU of a stage through a training run: which moment is the peak, and what the host holds meanwhile.

- *init*: context and communicators, and the weights as they will stay;
- *load*: one parameter tensor more at a time, as it comes from the host (at most the largest layer);
- *forward* of the last micro-batch in flight, *backward* of the oldest, *step*: from the second step on, so optimizer
  state is there throughout (:mod:`autoplan.cost_models.memory` prices the last two);
- *save*: states, and under ZeRO-3 one gathered layer.

Host memory is no part of any of them. A process that loads a checkpoint the plain way reads all of it into its own
memory; processes of one node do so at once unless the loader maps the file or loads on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.cluster import Device
from autoplan.cost_models import memory
from autoplan.cost_models.recipes import Recipe
from autoplan.plan import Strategy

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind

__all__ = ["MOMENTS", "MemoryTimeline", "host_load_bytes", "memory_timeline"]

MOMENTS = ("init", "load", "forward", "backward", "step", "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes by term at each of :data:`MOMENTS`; ``host_bytes`` are of the host, for one process that loads or saves."""

    moments: dict[str, dict[str, float]]
    host_bytes: float

    @property
    def peak_moment(self) -> str:
        """The name of the fullest moment; of equals the first."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.moments[self.peak_moment].values())


def memory_timeline(
    kinds_of_stage: Sequence[LayerKind],
    *,
    strategy: Strategy,
    stage: int,
    recipe: Recipe,
    device: Device,
    recompute: Sequence[str],
    shared_elements: int = 0,
) -> MemoryTimeline:
    """The timeline of stage ``stage``; the arguments are those of :func:`autoplan.cost_models.memory.stage_memory`, and
    the peak is never below it."""
    parts = memory.stage_parts(
        kinds_of_stage,
        strategy=strategy,
        stage=stage,
        recipe=recipe,
        device=device,
        recompute=recompute,
        shared_elements=shared_elements,
    )
    elements = memory.count_elements(kinds_of_stage)
    largest = elements.largest_layer * recipe.weights
    weights = {"weights": parts.states["weights"]}
    gathers = strategy.zero_stage >= 3 and strategy.data * strategy.context > 1
    written = max(
        (_written_bytes(kind, strategy.micro_batch_size / strategy.context) for kind in kinds_of_stage), default=0.0
    )
    forward = {name: parts.backward[name] for name in ("saved_activations", "gather_window")}
    forward["passing_activations"] = min(written, parts.backward["passing_activations"])
    return MemoryTimeline(
        moments={
            "init": parts.at(weights, {}),
            "load": parts.at(weights, {"load_window": largest}),
            "forward": parts.at(parts.states, forward),
            "backward": parts.at(parts.states, parts.backward),
            "step": parts.at(parts.states, parts.step),
            "save": parts.at(parts.states, {"gather_window": largest if gathers else 0.0}),
        },
        host_bytes=host_load_bytes(elements.total + shared_elements, element_bytes=recipe.weights, processes=1),
    )


def _written_bytes(kind: LayerKind, samples: float) -> float:
    """What the operator with the widest output writes in the forward."""
    return max((op.written_bytes * (samples if op.batched else 1) for op in kind.operators), default=0.0)


def host_load_bytes(elements: float, *, element_bytes: float, processes: int) -> float:
    """Host bytes while ``processes`` of one node each read a checkpoint of ``elements`` whole."""
    return elements * element_bytes * processes

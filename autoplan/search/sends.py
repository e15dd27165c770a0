"""What the stages of one strategy receive and send, in seconds of a micro-batch.

In a chain that is a matter of the cut; where values go further than to the next layer, of both ends of a span.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.cost_models import communication
from autoplan.cost_models.contention import NOTHING, Held, held_by_send
from autoplan.cost_models.piecewise import at_values
from autoplan.plan import Strategy
from autoplan.search.chain import Chain

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StageSends:
    """The sends of ``strategy`` over ``chain``."""

    chain: Chain
    strategy: Strategy
    cluster: Cluster
    _by_boundary: dict[int, Floats] = field(default_factory=dict, init=False)

    @cached_property
    def sent(self) -> Held:
        """What a stage's sends hold of its links beside one backward: one message, of what the smallest cut passes.
        Not counted where values go further than to the next layer: what is sent then depends on the order of layers."""
        least = self.chain.least_crossing
        if self.strategy.pipeline == 1 or self.chain.crossing is not None or not 0 < least < math.inf:
            return NOTHING
        distance = self.strategy.data * self.strategy.tensor
        return held_by_send(self.cluster, communication.send_s(self.cluster, least, distance), distance=distance)

    def sends_around(self, stage: int, first: Integers, end: Integers) -> Floats:
        """Seconds a micro-batch that spans receive and send on ``stage``."""
        around = np.zeros(len(first))
        if stage > 0:
            around = around + self._receive_s(stage, first, end)
        if stage < self.strategy.pipeline - 1:
            around = around + self._sent_s(stage, first, end)
        return around

    def _receive_s(self, stage: int, first: Integers, end: Integers) -> Floats:
        crossing = self.chain.crossing
        if crossing is None:
            return self.send_s(stage - 1)[first]
        return self._priced(stage - 1, crossing.received[first, end])

    def _sent_s(self, stage: int, first: Integers, end: Integers) -> Floats:
        crossing = self.chain.crossing
        if crossing is None:
            return self.send_s(stage)[end]
        return self._priced(stage, crossing.sent[first, end])

    def _priced(self, boundary: int, amounts: Floats) -> Floats:
        """Seconds over the link between stage ``boundary`` and the next."""
        width = self.strategy.data * self.strategy.tensor
        return at_values(
            lambda b: communication.boundary_send_s(self.cluster, b, stage=boundary, distance=width), amounts
        )

    def send_s(self, boundary: int) -> Floats:
        """[L + 1] seconds to send one micro-batch from stage ``boundary`` to the next, by cut."""
        distance = self.strategy.data * self.strategy.tensor
        # Boundaries that lie alike in their nodes take the same time.
        alike = boundary * distance % self.cluster.gpus_per_node
        if alike not in self._by_boundary:
            distinct, back = self.chain.distinct_cuts
            self._by_boundary[alike] = np.array(
                [communication.boundary_send_s(self.cluster, b, stage=boundary, distance=distance) for b in distinct]
            )[back]
        return self._by_boundary[alike]

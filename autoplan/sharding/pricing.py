"""What the tensor ILP pays for: seconds of operators and of collectives, for one sample, on a given cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.cost_models import communication
from autoplan.cost_models.compute import operator_time
from autoplan.layers.types import CollectiveName, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """``operator_s``: forward and backward of an operator; ``collective_s``: of a collective over the whole tensor's
    bytes, on a group of the tensor axis."""

    operator_s: Callable[[Operator], float]
    collective_s: Callable[[CollectiveName, float], float]

    def for_samples(self, samples: float) -> Pricing:
        """Collectives of one sample's share of a batch of ``samples``, which start up once."""
        return Pricing(
            operator_s=self.operator_s,
            collective_s=lambda name, bytes_: self.collective_s(name, bytes_ * samples) / samples,
        )


def price_on(cluster: Cluster, degree: int) -> Pricing:
    """Prices on ``cluster`` for a tensor group of ``degree`` neighbouring ranks."""
    group = communication.Group(size=degree, stride=1)
    functions = {
        "all_reduce": communication.all_reduce_s,
        "all_gather": communication.all_gather_s,
        "reduce_scatter": communication.reduce_scatter_s,
        "all_to_all": communication.all_to_all_s,
    }

    def collective_s(name: CollectiveName, bytes_: float) -> float:
        return functions[name](cluster, group, bytes_)

    def operator_s(operator: Operator) -> float:
        return operator_time(operator, cluster.device, micro_batch=1).total_s

    return Pricing(operator_s=operator_s, collective_s=collective_s)

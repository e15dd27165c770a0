"""Sequence parallelism: layers hand each other shares of the sequence instead of whole values.

Where every rank of the tensor axis would hold the same values [batch, sequence, hidden] (norms, dropout, residual
adds), each holds its part of the sequence; the all-reduces around matrix products become an all-gather before and a
reduce-scatter after (Korthikanti et al. 2022, section 4.2.2). Here that is one statement, which values layers hand
over as shares; the rest follows from the rules and the ILP.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.capture.shapes import MAX_BATCH
from autoplan.capture.types import Capture
from autoplan.errors import StrategyError
from autoplan.sharding.operation import GraphFacts, module_path
from autoplan.sharding.placements import Shard

SEQUENCE = 1  # the dimension of [batch, sequence, hidden]


def handed_over(capture: Capture, facts: GraphFacts, exported: Iterable[Node]) -> dict[Node, Shard]:
    """The values among ``exported`` (what layers read of each other) that are handed over as shares of the sequence.

    Raises StrategyError where none is [batch, sequence, hidden], or no sequence divides by the degree.
    """
    batch = MAX_BATCH if capture.dynamic_batch else capture.batch_size
    found: dict[Node, Shard] = {}
    odd: list[Node] = []
    for node in exported:
        if not _is_sequence(facts, node, batch):
            continue
        if facts.shapes[node][0][SEQUENCE] % facts.degree:
            odd.append(node)
        else:
            found[node] = Shard(SEQUENCE)
    if not found:
        raise _refusal(facts, odd)
    return found


def _is_sequence(facts: GraphFacts, node: Node, batch: int) -> bool:
    """Whether a value is [batch, sequence, hidden], has a gradient, and is computed."""
    shapes = facts.shapes[node]
    if node.op != "call_function" or len(shapes) != 1 or not facts.differentiable[node]:
        return False
    return len(shapes[0]) == 3 and shapes[0][0] == batch and shapes[0][SEQUENCE] > 1


def _refusal(facts: GraphFacts, odd: list[Node]) -> StrategyError:
    if not odd:
        return StrategyError(
            "sequence parallelism splits values [batch, sequence, hidden] between layers, and this model's layers hand "
            "over none",
            where="strategy.sequence_parallel",
            legal="sequence_parallel=false",
            attempt="plan with the tensor axis alone",
        )
    length = facts.shapes[odd[0]][0][SEQUENCE]
    degrees = [str(degree) for degree in range(1, length + 1) if length % degree == 0]
    return StrategyError(
        f"sequence parallelism over {facts.degree} ranks does not divide the sequence of {length} that "
        f"{module_path(odd[0]) or odd[0].name} hands over",
        where=node_line(odd[0]),
        legal=f"tensor degrees that divide it: {', '.join(degrees[:12])}",
        attempt=f"sequence_parallel=false, or a sequence that {facts.degree} divides",
    )

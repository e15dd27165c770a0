"""What went wrong on which rank, in one message."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from types import FrameType, TracebackType

from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.errors import AutoplanError, RuntimeFault

_PEER_SIGNS = ("Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "recvBytes failed")


class RankFault(RuntimeFault):
    """A rank failed. Fields are None where they do not apply; ``traceback_text`` is the original's."""

    def __init__(
        self,
        what: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        action: str = "",
        traceback_text: str = "",
        where: str = "",
        legal: str = "",
        attempt: str = "",
    ) -> None:
        super().__init__(what, where=where, legal=legal, attempt=attempt)
        self.rank, self.step, self.stage, self.micro_batch = rank, step, stage, micro_batch
        self.action, self.traceback_text = action, traceback_text

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.traceback_text.rstrip()}" if self.traceback_text else text


class CheckpointError(AutoplanError):
    """A checkpoint or a state dict does not fit the program, or its file is damaged."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether this looks like the echo of another rank's failure: a connection gone, or a wait timed out."""
    return any(sign in str(error) for sign in _PEER_SIGNS)


def action_fault(
    error: Exception,
    *,
    rank: int,
    step: int,
    stage: int,
    micro_batch: int | None,
    action: str,
    graph_module: GraphModule | None = None,
) -> RankFault:
    """``error``, raised in one action of a step, with everything that tells which."""
    place = f"rank {rank}, step {step}, stage {stage}"
    if micro_batch is not None:
        place += f", micro-batch {micro_batch}"
    node = failing_node(graph_module, error.__traceback__) if graph_module is not None else None
    operator = f", operator `{node.name}` ({node.target})" if node is not None else ""
    return RankFault(
        f"{place}, {action}{operator}: {type(error).__name__}: {error}",
        rank=rank,
        step=step,
        stage=stage,
        micro_batch=micro_batch,
        action=action,
        where=node_line(node) if node is not None else "",
        attempt="see the message of the rank that failed first: this one only lost its peer"
        if is_peer_failure(error)
        else "",
    )


def hang_fault(
    what: str,
    *,
    frames: list[tuple[FrameType, int]],
    rank: int,
    step: int,
    stage: int | None,
    micro_batch: int | None,
    action: str,
    graph_module: GraphModule | None,
) -> RankFault:
    """A rank that hangs in ``frames``, outermost first; ``{operator}`` in ``what`` is replaced by the node it is in."""
    node = _node_in(graph_module, frames) if graph_module is not None else None
    operator = f", operator `{node.name}` ({node.target})" if node is not None else ""
    return RankFault(
        what.format(operator=operator),
        rank=rank,
        step=step,
        stage=stage,
        micro_batch=micro_batch,
        action=action,
        traceback_text="It is at (most recent call last):\n"
        + "".join(traceback.StackSummary.extract(iter(frames)).format()),
        where=node_line(node) if node is not None else "",
        attempt="a longer patience, where it only is slow: AUTOPLAN_TIMEOUT_S=600",
    )


def frames_of(innermost: FrameType) -> list[tuple[FrameType, int]]:
    """A running thread's frames and lines, outermost first."""
    return list(traceback.walk_stack(innermost))[::-1]


def failing_node(graph_module: GraphModule, trace: TracebackType | None) -> Node | None:
    """The node whose generated line raised, of a recomputed graph within where it was there, or None where the failure
    is not in the graph's own code."""
    return _node_in(graph_module, traceback.walk_tb(trace))


def _node_in(graph_module: GraphModule, frames: Iterable[tuple[FrameType, int]]) -> Node | None:
    modules = {
        getattr(type(module).forward, "__code__", None): module
        for module in graph_module.modules()
        if isinstance(module, GraphModule)
    }
    found: Node | None = None
    for frame, line in frames:
        module = modules.get(frame.f_code)
        if module is not None:
            lines: dict[int, int] = getattr(module, "_lineno_map", None) or {}
            index = lines.get(line - (getattr(module, "_prologue_start", 0) or 0))
            nodes = list(module.graph.nodes)
            found = nodes[index] if index is not None and index < len(nodes) else found
    return found

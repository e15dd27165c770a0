"""Of what a forward changes or asks for beside computing: whether it is a side effect, left out and said, or whether a
number of the program depends on it, which is refused.

Generators of random numbers and the system's entropy are refused whenever they are drawn from: the traced program would
repeat one draw, and two draws may agree by chance. Everything else is judged by how the loss is made:

1. The forward is called twice under one trace, so that the second call finds what the first left; where its loss is
   made otherwise, the state is read.
2. What has not differed by the second call may in the hundredth. So the forward is traced with numbers that tell what
   is made of them (:mod:`.tracked`): an operator that gets one reads it, and so does a comparison of one if, answered
   the other way, the loss is made otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.fx import GraphModule

from autoplan.capture.errors import described_line, forward_line, node_line
from autoplan.capture.lines import first_line
from autoplan.capture.noticed import Noticed
from autoplan.capture.second_call import first_difference, written_constant
from autoplan.capture.tracked import Reads, reading
from autoplan.capture.unkept import plain_tensor
from autoplan.errors import CaptureError

_COMPARISONS = 8  # lines whose comparison is answered the other way, a trace each
Trace = Callable[[int], GraphModule]


def check(noticed: Noticed, model: nn.Module, first: GraphModule, trace: Trace) -> list[str]:
    """The notes of what is left out. ``first`` is the forward's graph, ``trace(n)`` that of n calls.

    Raises CaptureError where a number of the program depends on what is not in it."""
    if noticed.draws or noticed.sources.entropy:
        raise _random(noticed, model, trace)
    if (writing := written_constant(first)) is not None:
        raise plain_tensor(node_line(writing))
    if not noticed.may_differ:
        return []
    clocks = list(dict.fromkeys(noticed.sources.clocks))
    changed = list(noticed.state)
    try:
        second = trace(2)
    except CaptureError:
        raise
    except Exception as error:
        raise state_refusal(noticed, model, trace) from error
    if noticed.draws or noticed.sources.entropy:
        raise _random(noticed, model, trace)
    if (differing := first_difference(first, second)) is not None:
        if changed:
            raise state_refusal(noticed, model, trace)
        raise _clock(clocks, differing) if clocks else _unknown(differing)
    if (line := _later_reader(first, trace, noticed)) is not None:
        if changed:
            raise state_refusal(noticed, model, trace, reader=line)
        raise _clock(clocks, line)
    return [f"forward changes {name}: a side effect that the captured program does not have" for name in changed]


def _later_reader(first: GraphModule, trace: Trace, noticed: Noticed) -> str | None:
    """The line at which a later call would go another way; None where none is found."""
    if not (noticed.state or noticed.sources.clocks):
        return None
    reads = Reads()
    _tracked_trace(reads, trace, noticed)
    if reads.given:
        return reads.given
    for line in list(reads.compared)[:_COMPARISONS]:
        other = _tracked_trace(Reads(otherwise=line), trace, noticed)
        # What fails on the other way is no other loss: an assertion, a log that looks at values.
        if other is not None and first_difference(first, other) is not None:
            return described_line(line)
    return None


def _tracked_trace(reads: Reads, trace: Trace, noticed: Noticed) -> GraphModule | None:
    with reading(reads):
        try:
            return trace(1)
        except Exception:
            return None


def _random(noticed: Noticed, model: nn.Module, trace: Trace) -> CaptureError:
    names = noticed.draws
    if names:
        what = f"draws from {_listed(names)}"
        line = _first_change(noticed, names, trace)
    else:
        what, line = "draws from the system's entropy", noticed.sources.entropy[0][1]
    return CaptureError(
        f"forward {what}: the traced program would repeat one draw for ever",
        where=line or forward_line(model),
        legal="torch's own random operators (torch.rand, torch.randperm, dropout), or none",
        attempt="draw with torch.rand(()) and choose with torch.where, or draw outside and pass the value as an input",
    )


def _clock(clocks: list[tuple[str, str]], reader: str) -> CaptureError:
    name, line = clocks[0]
    return CaptureError(
        f"forward reads {name}, and a number depends on it at {reader}: the traced program would keep the one answer "
        "that it saw",
        where=line,
        legal="clocks that are read to log; numbers that come from inputs, parameters and buffers",
        attempt="read it outside and pass the value as an input",
    )


def _unknown(differing: str) -> CaptureError:
    return CaptureError(
        "forward computes something else at its next call, from what is neither input, parameter nor buffer: the "
        "captured program would repeat the first call for ever",
        where=differing,
        legal="numbers that come from inputs, parameters and buffers; torch's own random operators",
        attempt="read it outside and pass the value as an input",
    )


def state_refusal(noticed: Noticed, model: nn.Module, trace: Trace, reader: str = "") -> CaptureError:
    """The error of a model whose later call reads what this one changed; ``reader``: the line, where it is known."""
    changed = noticed.state
    place = _first_change(noticed, changed, trace) or forward_line(model)
    when = "a later call reads it at " + reader if reader else "the next call computes something else for it"
    return CaptureError(
        f"forward changes {_listed(changed)}, and {when}: the captured program would repeat the first call for ever",
        where=place,
        legal="state in buffers, which is kept from step to step; attributes that no later call reads",
        attempt=f"{_buffer(changed[0])} and change it in place, or pass the value as an input",
    )


def _buffer(name: str) -> str:
    attribute = name.rpartition(".")[2] if name.startswith("self.") and "[" not in name else "state"
    return f"self.register_buffer({attribute!r}, torch.zeros(...))"


def _first_change(noticed: Noticed, names: list[str], trace: Trace) -> str:
    among = frozenset(names)
    return first_line(lambda: noticed.has_changed(among), lambda: trace(1))


def _listed(names: list[str]) -> str:
    shown = names[:3]
    return " and ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

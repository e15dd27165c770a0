"""From what torch raises while tracing to one message with the user's file and line.

torch's messages name its own files and dump partial graphs. The exception's traceback holds the truth: its last frame
that is neither torch's, nor Python's, nor this room's is the line that cannot be traced.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from autoplan.errors import CaptureError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_AUTOPLAN = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_CALL = _HERE + "trace.py"  # calls the model
_PYTHON = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep
_PACKAGES = tuple(
    {os.path.abspath(sysconfig.get_paths()[key]) + os.sep for key in ("purelib", "platlib")},
)

_FORBIDDEN_LINES = (
    # the operator's name in torch's message or in the source line -> what to write instead
    (".item()", "keep the value a tensor: compare and select with torch.where"),
    (".tolist()", "keep the values a tensor: index and mask it instead of a Python list"),
    (".numpy()", "stay in torch: NumPy sees values, which tracing has not"),
    ("range(", "loop over a Python number fixed when the model is built"),
    ("if ", "write both sides and choose with torch.where, or decide by shapes or settings instead of values"),
    ("while ", "loop a fixed number of times and mask what is finished"),
    ("assert ", "check values outside forward, or drop the assert"),
)


def user_frame(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame of the user's own code; of an installed package's where there is none."""
    candidates = [frame for frame in frames if is_model_file(frame.filename)]
    own = [frame for frame in candidates if not os.path.abspath(frame.filename).startswith(_PACKAGES)]
    chosen = own or candidates
    return chosen[-1] if chosen else None


@functools.lru_cache(maxsize=4096)
def is_model_file(filename: str) -> bool:
    """Whether it is neither torch's, nor Python's, nor of this room."""
    path = os.path.abspath(filename)
    if path.startswith((_TORCH, _HERE)) or not os.path.exists(path):
        return False
    return path.startswith(_PACKAGES) or not path.startswith(_PYTHON)


def is_torchs(filename: str) -> bool:
    """Whether it is torch's."""
    return os.path.abspath(filename).startswith(_TORCH)


def is_ours(filename: str) -> bool:
    """Whether it is of this room."""
    return os.path.abspath(filename).startswith(_HERE)


@functools.lru_cache(maxsize=4096)
def is_users_file(filename: str) -> bool:
    """Whether it is the user's own, and of no installed package; nor of this one, wherever it lies."""
    return is_model_file(filename) and not os.path.abspath(filename).startswith((*_PACKAGES, _AUTOPLAN))


def describe(frame: traceback.FrameSummary) -> str:
    """``file.py:12 in forward: `the line```."""
    line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f": `{line}`" if line else "")


def described_line(place: str) -> str:
    """``file.py:12`` with the line that stands there."""
    file, _, number = place.rpartition(":")
    line = linecache.getline(file, int(number)).strip()
    return place + (f": `{line}`" if line else "")


def current_line() -> str:
    """The user's line that is running now, for hooks inside torch's functions: of the forward, not of its callers."""
    frames = traceback.extract_stack()[:-1]
    frame = user_frame(in_forward(frames) or frames)
    return describe(frame) if frame else "unknown line"


def in_forward(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Those of the model's forward and what it calls, where ``frames`` are of a trace that is in it; else none."""
    calls = [index for index, frame in enumerate(frames) if (frame.filename, frame.name) == (_CALL, "forward")]
    return frames[calls[-1] :] if calls else ()


def in_forward_now() -> bool:
    """Whether the model's forward is running, under trace."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (_CALL, "forward"):
        frame = frame.f_back
    return frame is not None


def frame_behind(frame: FrameType | None, passing: Callable[[str], bool]) -> FrameType | None:
    """The first frame from ``frame`` outwards whose file is not ``passing``."""
    while frame is not None and passing(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def forward_line(module: torch.nn.Module) -> str:
    """Where the module's forward is written."""
    return definition_line(type(module).forward)


def definition_line(function: Callable[..., Any]) -> str:
    """Where a function is written; its name where that is not in Python."""
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"{code.co_filename}:{code.co_firstlineno} in {name}" if code else name


def node_line(node: torch.fx.Node) -> str:
    """The user's line that made a node of the graph."""
    frame = node_frame(node)
    return describe(frame) if frame else f"operator {node.target}"


def node_frame(node: torch.fx.Node) -> traceback.FrameSummary | None:
    """Where the user's line that made a node of the graph stands; None where the trace does not say."""
    return user_frame(
        traceback.FrameSummary(file, int(number), name, lookup_line=False)
        for file, number, name in _parse_stack(node.meta.get("stack_trace") or "")
    )


def _parse_stack(text: str) -> list[tuple[str, str, str]]:
    frames = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith('File "') and ", line " in line:
            file, _, rest = line[len('File "') :].partition('", line ')
            number, _, name = rest.partition(", in ")
            if number.isdigit():
                frames.append((file, number, name))
    return frames


def trace_failure(error: BaseException, module: torch.nn.Module) -> CaptureError:
    """The message for whatever torch.export raised."""
    frames = _frames(error)
    frame = user_frame(frames)
    where = describe(frame) if frame else forward_line(module)
    first = _first_line(error)
    if is_data_dependent(error):
        line = ((frame.line if frame else "") or "").strip()
        return CaptureError(
            "cannot trace this model: its Python control flow depends on a tensor's values",
            where=where,
            legal="control flow that depends on shapes, settings or Python numbers",
            attempt=_mend(line),
        )
    return CaptureError(
        f"cannot trace this model: {type(error).__name__}: {first}",
        where=where,
        legal="a forward that runs on the example inputs as it stands",
        attempt="run model(*example_inputs) in plain Python first; if that works, rewrite the line above without "
        "what depends on tensors' values",
    )


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the innermost cause first seen by the user: a re-raise by torch keeps the cause's traceback."""
    frames: list[traceback.FrameSummary] = []
    seen: BaseException | None = error
    while seen is not None:
        frames = [*traceback.extract_tb(seen.__traceback__)]
        if user_frame(frames):
            return frames
        seen = seen.__cause__ or seen.__context__
    return frames


def data_dependent_kinds() -> tuple[type[Exception], ...]:
    """What torch raises where values would have to be known; loaded when it is asked for, with all of sympy."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException


def is_data_dependent(error: BaseException) -> bool:
    """Whether tracing failed because values are not known."""
    kinds = data_dependent_kinds()
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds) or "data-dependent" in str(seen) or ".numpy() is not supported" in str(seen):
            return True
        seen = seen.__cause__
    return False


def _mend(line: str) -> str:
    for sign, mend in _FORBIDDEN_LINES:
        if sign in line:
            return mend
    return "choose with torch.where or a mask instead of by Python control flow"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"

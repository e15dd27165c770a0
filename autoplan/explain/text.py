"""Numbers and lines as people read them."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar

# Columns: what is written has so many unless more are there, and sentences never more than the last, to be read.
WIDTH, WIDEST, WIDEST_TEXT = 80, 160, 100
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_ROUNDED_UP = 0.9995  # of a unit: what three digits show as 1000 of the one below
_AS_TIMES = 3.0  # of what it was: percentages of more are no longer read


_width: ContextVar[int] = ContextVar("columns", default=WIDTH)


@contextlib.contextmanager
def columns(number: int) -> Iterator[None]:
    """Headings, paragraphs and :func:`width` take ``number`` columns inside, from :data:`WIDTH` to :data:`WIDEST`."""
    token = _width.set(max(WIDTH, min(WIDEST, number)))
    try:
        yield
    finally:
        _width.reset(token)


def width() -> int:
    """Columns that tables may take."""
    return _width.get()


def size(value: float) -> str:
    """Bytes, such as ``71.3 GiB``."""
    for unit, name in _BINARY:
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} B"


def seconds(value: float) -> str:
    """A duration, such as ``54.8 ms`` or ``3 h 53 min``."""
    if value >= 2 * 3600:
        return f"{round(value / 60) // 60:,} h {round(value / 60) % 60} min"
    if value >= 120:
        return f"{round(value) // 60} min {round(value) % 60} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def count(value: float) -> str:
    """A number, such as ``8.03 B``."""
    for unit, name in _COUNTS:
        if value >= unit * _ROUNDED_UP:
            return f"{_three(value / unit)} {name}"
    return f"{value:.0f}"


def rate(value: float) -> str:
    """Bytes per second, such as ``1,050 GB/s``: of links, by the unit that data sheets have."""
    return f"{_three(value / 1e9)} GB/s"


def ratio(value: float) -> str:
    """How many times, such as ``1.5`` or ``1,900``."""
    return _three(value, 2)


def change(before: float, after: float) -> str:
    """By how much ``after`` is more, such as ``+12.3%``; of what is several times as much, ``42.1 times``."""
    times = after / before
    return f"{times - 1:+.1%}" if times < _AS_TIMES else f"{_three(times)} times"


def _three(value: float, digits: int = 3) -> str:
    """So many digits that count, and all those before the point: never a power of ten."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 and abs(value) >= 1e-4 else f"{value:,.0f}"


def percent(value: float) -> str:
    """A share, such as ``12.3%``."""
    return f"{value * 100:.1f}%"


def heading(text: str) -> str:
    """A section's first line."""
    return f"{text} {'-' * (width() - len(text) - 1)}"


def paragraph(text: str, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """``text`` wrapped; ``hanging`` is the indent of all lines but the first."""
    follow = indent if hanging is None else hanging
    most = min(width(), WIDEST_TEXT)
    return textwrap.wrap(text, most, initial_indent=indent, subsequent_indent=follow, break_on_hyphens=False)


def shorten(text: str, width: int) -> str:
    """``text`` in ``width`` columns, its middle left out where it is longer."""
    if len(text) <= width:
        return text
    tail = (width - 2) * 2 // 3
    return f"{text[: width - 2 - tail]}..{text[-tail:]}"


def bar(share: float, width: int, mark: str = "#") -> str:
    """``share`` of ``width`` as marks; anything above 0 shows."""
    filled = min(width, max(round(share * width), 1 if share > 0 else 0))
    return mark * filled + "." * (width - filled)

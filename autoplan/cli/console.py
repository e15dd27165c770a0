"""Where things are printed: results on stdout, messages and progress on stderr; colour only on a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.cli.streams import that_may_fail

# Of laid out text: headings and what stands over a table or a list; bars, in which a letter is a kind of memory or of
# work; what a plan gains and loses.
_STYLES = (
    (r"(?m)^\S.* -{3,}$", "bold cyan"),
    (r"(?m)^ +(stage|operator|layer|micro-batch)\b.*$(?=\n +\d)", "bold"),
    (r"(?m)^[A-Z][^.\n]{2,60}:?$(?=\n(- |  ))", "bold"),
    (r"(?<=\[)W+(?=[GOAx.\]])", "blue"),
    (r"(?<=[\[W])G+(?=[OAx.\]])", "green"),
    (r"(?<=[\[WG])O+(?=[Ax.\]])", "magenta"),
    (r"(?<=[\[WGO])A+(?=[x.\]])", "yellow"),
    (r"(?<=[\[WGOA])x+(?=[.\]])", "red"),
    (r" #+(?=[.\s])", "blue"),
    (r"(?<=[\[WGOAx#])\.{2,}(?=[\]\s])", "dim"),
    (r"(?m)^(ok|equal)\b", "green"),
    (r"(?m)^(FAIL|different|wrong)\b", "bold red"),
)


def out() -> Console:
    """The console of results; made anew, so that a redirected stdout is honoured."""
    return Console(highlight=False, soft_wrap=False)


def err() -> Console:
    """The console of messages."""
    return Console(stderr=True, highlight=False)


def error_line(text: str) -> None:
    """``error: ...`` on stderr; further lines of ``text`` follow as they are."""
    with that_may_fail():
        _error_line(text)


def _error_line(text: str) -> None:
    console = err()
    if console.is_terminal:
        console.print("[bold red]error:[/]", end="")
        first, *rest = text.splitlines()
        lines = [
            *folded(f"error: {first}", 7, console.width),
            *(fold for line in rest for fold in folded(line, 9, console.width)),
        ]
        console.print("\n".join(lines).removeprefix("error:"), markup=False, soft_wrap=True)
    else:
        sys.stderr.write(f"error: {text}\n")


def folded(text: str, hanging: int, width: int = 80) -> list[str]:
    """``text`` in lines of ``width``, all but the first ``hanging`` columns in; words stay whole, to be copied."""
    return textwrap.wrap(text, width, subsequent_indent=" " * hanging, break_on_hyphens=False, break_long_words=False)


def note(text: str) -> None:
    """A message for a person, on stderr: in a file one line, on a terminal folded between words."""
    console = err()
    shown = "\n".join(folded(text, 2, console.width)) if console.is_terminal else text
    with that_may_fail():
        console.print(shown, markup=False, soft_wrap=True, style="dim")


def result(*renderables: RenderableType) -> None:
    """Print tables and text as the command's result."""
    console = out()
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable, markup=False)
    lines = captured.get().splitlines()  # tables pad their last column: of no use in a file or a diff
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))


def told(text: str) -> None:
    """Print text that is laid out already, such as an explanation, as the command's result: on a terminal its headings
    stand out and its bars have colours."""
    console = out()
    if not console.is_terminal:
        sys.stdout.write(f"{text.rstrip()}\n")
        return
    styled = Text(text.rstrip())
    for pattern, style in _STYLES:
        styled.highlight_regex(pattern, style)
    console.print(styled, soft_wrap=True)


def result_json(data: Any) -> None:
    """Print one JSON object as the command's result: plain bytes, whatever the terminal.

    JSON has no NaN and no infinity: a figure that is no number is null.
    """
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """A bar on stderr while the body runs, and says how far it is; nothing where stderr is no terminal."""
    console = err()
    if not console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from autoplan.progress import heard_by

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(share: float | None, now: str) -> None:
            bar.update(task, total=None if share is None else 1.0, completed=share or 0.0, description=f"{what}: {now}")

        with heard_by(show):
            yield


def table(*columns: tuple[str, bool]) -> Table:
    """A plain table; each column is (heading, whether it holds numbers)."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, numeric in columns:
        made.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    return made

"""A report in words, 80 columns wide."""

from __future__ import annotations

import textwrap

from autoplan.explain.text import WIDTH, count, seconds, shorten
from autoplan.verification.types import Check, Numeric, VerifyReport

_LABEL = 9
_NAME = 22
_SHOWN = 12  # layers before the middle of a long table is left out


def report_text(report: VerifyReport) -> str:
    """The report: what was proven without running, what was run, and the first difference."""
    lines = [
        *_labelled("Plan", f"{report.model}, {report.strategy.describe()}, {report.gpus:,} GPUs"),
        *_static(report.static),
        *_numeric(report.numeric),
        *_labelled("Verdict", _verdict(report)),
    ]
    spent = ", ".join(f"{name} {seconds(value)}" for name, value in report.seconds.items())
    return "\n".join([*lines, *_labelled("Took", spent)])


def _labelled(label: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(text, WIDTH - _LABEL, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{label if not index else '':{_LABEL}}{line}" for index, line in enumerate(wrapped)]


def _static(checks: tuple[Check, ...]) -> list[str]:
    lines: list[str] = []
    for index, check in enumerate(checks):
        mark = "ok   " if check.ok else "WRONG"
        lines += _labelled("" if index else "Static", f"{mark} {check.name}: {check.detail}")
        for label, text in (("layer", check.layer), ("at", check.where)):
            if text and not check.ok:
                lines += _labelled("", f"      {label}: {text}")
    return lines


def _numeric(numeric: Numeric) -> list[str]:
    if numeric.strategy is None:
        return _labelled("Numeric", f"{numeric.status}: {numeric.reason}")
    strategy = numeric.strategy
    lines = _labelled(
        "Numeric",
        f"{numeric.status}: {numeric.steps} AdamW steps of {strategy.describe()} on {count(numeric.ranks)} processes, "
        f"{strategy.micro_batches} micro-batches of {strategy.micro_batch_size}, tolerance {numeric.tolerance:g}",
    )
    if numeric.reductions:
        lines += _labelled("", "reduced: " + "; ".join(numeric.reductions))
    if numeric.layers:
        lines += ["", f"  {'layer':{_NAME}}{'tensors':>8}{'error, allowed = 1':>20}"]
        shown = list(numeric.layers)
        if len(shown) > _SHOWN:
            wrong = [row for row in shown if not row.equal]
            shown = sorted(wrong[:_SHOWN] or [*shown[: _SHOWN // 2], *shown[-_SHOWN // 2 :]], key=numeric.layers.index)
        for row in shown:
            mark = "" if row.equal else f"  {shorten(row.tensor, WIDTH - _NAME - 32)}"
            lines.append(f"  {shorten(row.layer, _NAME - 1):{_NAME}}{row.compared:>8}{row.worst:>20.2g}{mark}")
        if len(shown) < len(numeric.layers):
            lines.append(f"  ({len(numeric.layers) - len(shown)} more)")
        lines.append("")
    return lines


def _verdict(report: VerifyReport) -> str:
    first = report.numeric.first
    if first is not None:
        return f"DIFFERENT. First: {first.describe()}" + (f", at {first.where}" if first.where else "")
    if not report.static_ok:
        return "WRONG: see the static check above"
    if report.numeric.status == "not run":
        return "the program is sound as far as it can be told without running it"
    if report.equal:
        return "the same numbers"
    return f"not shown to be equal: {report.numeric.reason}"

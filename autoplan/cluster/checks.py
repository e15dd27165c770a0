"""Checks that SPEC texts, cluster files and device files share; each raises one :class:`ClusterError`."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.errors import ClusterError

LEGAL = (
    "8, 8xH100, 2x8xA100-80GB (nodes x GPUs a node x kind), 4xp5.48xlarge, 4xcpu, 2x8xH100+2x8xA100-80GB, or a cluster "
    "file (.toml)"
)
MOST_GPUS = 10_000_000

# What a figure can be at all: outside of it something is in the wrong unit, and times would be zero or infinite.
_RANGES: dict[str, tuple[float, float]] = {
    "bytes_per_s": (1e3, 1e16),
    "gbit_per_s": (1e-5, 1e8),
    "latency_s": (1e-12, 60.0),
    "oversubscription": (1.0, 1e4),
    "peers": (1, 1e4),
    "sms": (1, 1e6),
    "memory_bytes": (2.0**20, 1e16),
    "memory_bytes_per_s": (1e3, 1e18),
    "launch_s": (1e-12, 60.0),
    "context_bytes": (1e-9, 1e15),
    "gemm_efficiency": (1e-6, 1.0),
    "attention_forward_efficiency": (1e-6, 1.0),
    "attention_backward_efficiency": (1e-6, 1.0),
    "memory_efficiency": (1e-6, 1.0),
}
_PEAK = (1e3, 1e21)
# A value of each, in the order of what machines have.
_EXAMPLES = {
    "bytes_per_s": "25e9",
    "gbit_per_s": "200",
    "latency_s": "5e-6",
    "oversubscription": "2",
    "peers": "8",
    "sms": "132",
    "memory_bytes": "80e9",
    "memory_bytes_per_s": "3e12",
    "launch_s": "4e-6",
    "context_bytes": "1e9",
} | {name: "0.8" for name in _RANGES if name.endswith("efficiency")}
_WHOLE = ("peers", "sms")


def load_toml(path: Path) -> dict[str, Any]:
    """A file's tables."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(
            f"not TOML: {error}", where=str(path), attempt='device = "H100", nodes = 2, gpus_per_node = 8, a line each'
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or (
            "a number in it is far too long" if "digits" in str(error) else "not a text file"
        )
        raise ClusterError(f"cannot read the cluster file: {reason}", where=repr_path(path), legal=LEGAL) from None
    except RecursionError:
        raise ClusterError("not a cluster file: lists nested without end", where=str(path), legal=LEGAL) from None


def repr_path(path: Path) -> str:
    """A path in a message: characters that cannot be printed are escaped."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def values(data: Mapping[str, Any]) -> dict[str, Any]:
    """Tables ``{value, source}`` as their value, at any depth."""
    plain: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            plain[key] = value["value"] if "value" in value else values(value)
        else:
            plain[key] = value
    return plain


def refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], *, where: str, inside: str = "") -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ClusterError(
                f"unknown field `{inside}{key}`",
                where=where,
                legal=", ".join(known),
                attempt=f"did you mean `{near[0]}`?" if near else "remove it",
            )


def number(data: Mapping[str, Any], key: str, where: str) -> float:
    """A positive, finite number."""
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or value <= 0:
        least, most = _RANGES.get(key, _PEAK)
        raise ClusterError(
            f"field `{key}` is a positive number, not {shown(value)}",
            where=where,
            legal=f"a number from {least:g} to {most:g}",
            attempt=f"{key} = {_EXAMPLES.get(key, '100e12')}",
        )
    return float(value)


def figure(data: Mapping[str, Any], key: str, where: str) -> float:
    """A number that the field can have; whole numbers for what is counted."""
    value = number(data, key, where)
    least, most = _RANGES.get(key, _PEAK)
    if not least <= value <= most or (key in _WHOLE and value != int(value)):
        kind = "a whole number" if key in _WHOLE else "a number"
        raise ClusterError(
            f"field `{key}` cannot be {shown(data[key])}", where=where, legal=f"{kind} from {least:g} to {most:g}"
        )
    return value


def text(data: Mapping[str, Any], key: str, where: str) -> str:
    """Printable text."""
    value = data[key]
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 100:
        raise ClusterError(f"field `{key}` is a short text, not {shown(value)}", where=where, attempt=f'{key} = "A100"')
    return value.strip()


def integer(value: object, what: str, *, where: str) -> int:
    written = str(value).strip() if not isinstance(value, dict | list) else ""
    if isinstance(value, bool | float) or not re.fullmatch(r"[+-]?[0-9]+", written):
        raise ClusterError(f"{what}: {shown(value)} is not a whole number", where=where, **_legal(what))
    if len(written) > 20:
        raise ClusterError(f"{what}: no cluster has so many", where=where, legal=f"1 to {MOST_GPUS}")
    check_positive(int(written), what, where=where)
    return int(written)


def check_positive(number: int, what: str, *, where: str) -> None:
    if number < 1:
        raise ClusterError(f"{what} must be 1 or more, not {number}", where=where, **_legal(what))
    if number > MOST_GPUS:
        raise ClusterError(f"{what}: {number} are more than any cluster has", where=where, legal=f"1 to {MOST_GPUS}")


def shown(value: object) -> str:
    """A value in a message, short."""
    try:
        written = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number far too long"
    return written if len(written) <= 60 else f"{written[:57]}..."


def _finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def _legal(what: str) -> dict[str, str]:
    """Of a field of a cluster file, its values; else what a SPEC may be."""
    if what.startswith("field"):
        names = re.findall(r"`(\w+)`", what)
        return {"legal": f"a positive whole number: 1 to {MOST_GPUS}", "attempt": f"{names[0]} = 2"}
    return {"legal": LEGAL, "attempt": "8xH100"}

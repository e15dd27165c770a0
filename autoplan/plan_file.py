"""The text of a plan file: how it is laid out, and how files of older revisions are read.

A file is JSON, two spaces deep, in the order of the fields, so that two plans differ in the lines that matter: a
stage's layers and how many of them are recomputed are one line.

``schema`` counts what readers must know of, ``revision`` what was added since to the fields. A file of an older
revision is brought to the newest by the steps of :data:`STEPS`, one revision each; one of a newer revision is refused,
because a field that is not known here may be what it is about. ``first_revision`` is that of the file as it was first
written, and stays when it is brought up and saved: what older files do not hold was never checked.

The last line is a digest of all others: a slip of the editor, a merge of two plans, or a figure that was mended by hand
and now is nobody's, is seen on reading. It is no signature: who means to write a plan of their own can compute it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from autoplan.schedules import sends_a_micro_batch

REVISION = 7
DIGEST_SINCE = 5
FIRST_SINCE = 6
# Fields that came with a revision, by their paths: in a file of an older one they are of nobody.
_CAME_WITH = {
    5: (("digest",), ("cluster", "peak_flops"), ("cluster", "groups", "peak_flops")),
    6: (("first_revision",), ("model", "layer_kinds")),
}
# Of an object: the keys that share its first line; lists that are one line.
_FIRST_LINE = ("first_layer", "last_layer", "recompute")
_ONE_LINE = ("layer_recompute",)

Data = dict[str, Any]


# What a digest is not of: itself, and how long the search took, which is no part of the plan.
_BESIDE = ("digest", "seconds")
# Whole numbers up to here are floats too.
_WHOLE = 2**53


def digest_of(data: Data) -> str:
    """SHA-256 of a plan's data, whatever the order of its keys; a number is the same as 1 and as 1.0, because not every
    tool that writes JSON tells them apart."""
    plain = {name: _as_floats(value) for name, value in data.items() if name not in _BESIDE}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_floats(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_floats(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _WHOLE:
        return value
    return float(value)


def dump(data: Data) -> str:
    """``data`` as the text of a file, with a final newline."""
    return _text(data, "") + "\n"


def _text(value: Any, indent: str, key: str = "") -> str:
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        first = [name for name in _FIRST_LINE if name in value] if _FIRST_LINE[0] in value else []
        lines = [", ".join(f"{json.dumps(name)}: {json.dumps(value[name])}" for name in first)] if first else []
        lines += [
            f"{json.dumps(name)}: {_text(part, deeper, name)}" for name, part in value.items() if name not in first
        ]
        return _block("{", lines, "}", indent)
    if isinstance(value, list) and value and key not in _ONE_LINE and not _pair(value):
        return _block("[", [_text(part, deeper) for part in value], "]", indent)
    return json.dumps(value)


def _pair(value: list[Any]) -> bool:
    return len(value) == 2 and all(isinstance(part, int) for part in value)


def _block(opening: str, lines: list[str], closing: str, indent: str) -> str:
    return f"{opening}\n" + ",\n".join(f"{indent}  {line}" for line in lines) + f"\n{indent}{closing}"


class NoRevisionError(ValueError):
    """What stands where a file's revision is was never one: revisions count from 1."""


def migrate(data: Data) -> Data:
    """``data`` of a file of any revision up to the newest as that of the newest.

    What an older file does not say is derived where that is exact, else left to the fields' defaults; a file that
    is malformed stays so, for the reader to name the field. ``first_revision`` says what it was, also where it is
    written again. Raises ``ValueError`` for a revision that is not known, :class:`NoRevisionError` for what is none at
    all.
    """
    revision = data.get("revision", 1)
    if isinstance(revision, bool) or not isinstance(revision, int) or revision < 1:
        raise NoRevisionError(f"field `revision` is {json.dumps(revision)}")
    if revision > REVISION:
        raise ValueError(f"its revision is {revision!r}")
    for step in range(revision, REVISION):
        data = {**STEPS[step](data), "revision": step + 1}
    return {**data, "first_revision": _first(data, revision)} if revision < FIRST_SINCE else data


def _first(data: Data, revision: int) -> int:
    """The revision of the file as it was first written. Those of revision 5 that were older before lack the peak."""
    cluster = data.get("cluster")
    if revision < DIGEST_SINCE or not isinstance(cluster, dict):
        return revision
    groups = cluster.get("groups")
    said = [cluster, *(group for group in (groups if isinstance(groups, list) else ()) if isinstance(group, dict))]
    return revision if any(part.get("peak_flops") for part in said) else DIGEST_SINCE - 1


def too_new(data: Data) -> tuple[str, int] | None:
    """A field that files of the revision of ``data`` did not have, and the revision that it came with."""
    revision = data.get("revision", 1)
    for since, paths in _CAME_WITH.items():
        for path in paths if since > revision else ():
            if _has(data, path):
                return ".".join(path), since
    return None


def _has(value: Any, path: tuple[str, ...]) -> bool:
    if isinstance(value, list):
        return any(_has(part, path) for part in value)
    if not isinstance(value, dict) or path[0] not in value:
        return False
    return len(path) == 1 or _has(value[path[0]], path[1:])


def _from_first(data: Data) -> Data:
    """Files before revision 2 had no ``revision``, and the first of them no ``send_s``: only what all sends of a step
    take on the stage with the longest period. As on the timeline of such files, they are alike at every boundary."""
    stages, predicted = data.get("stages"), data.get("predicted")
    terms = predicted.get("time_terms") if isinstance(predicted, dict) else None
    sends_s = terms.get("sends") if isinstance(terms, dict) else None
    if not isinstance(stages, list) or len(stages) < 2 or not isinstance(sends_s, int | float):
        return data
    if not all(isinstance(stage, dict) and "send_s" not in stage for stage in stages):
        return data
    each_s = sends_s / (2 * (len(stages) - 1))
    return {**data, "stages": [{**stage, "send_s": each_s} for stage in stages[:-1]] + stages[-1:]}


def _from_second(data: Data) -> Data:
    """Files before revision 3 did not say what stages' times are made of, which nothing else in them tells."""
    return data


def _from_third(data: Data) -> Data:
    """Files before revision 4 did not say what stages compute in FLOPs, which nothing else in them tells."""
    return data


def _from_fourth(data: Data) -> Data:
    """Files before revision 5 did not say what a GPU computes at most, and had no digest."""
    return data


def _from_fifth(data: Data) -> Data:
    """Files before revision 6 did not say which layers are of one kind, which nothing else in them tells, nor of which
    revision they were first. Where two pipeline ranks hold several stages each, they counted one message a stage: each
    rank sends the activations of all its stages and the gradients of all, but for the model's last or first."""
    strategy, axes = data.get("strategy"), data.get("axes")
    if not isinstance(strategy, dict) or not isinstance(axes, list) or strategy.get("pipeline") != 2:
        return data
    virtual, micro = strategy.get("virtual_stages"), strategy.get("micro_batches")
    if not isinstance(virtual, int) or not isinstance(micro, int):
        return data
    counted = {"name": "pipeline", "times_per_step": micro * virtual}
    return {
        **data,
        "axes": [
            {**axis, "times_per_step": micro * sends_a_micro_batch(ranks=2, virtual_stages=virtual)}
            if isinstance(axis, dict) and counted.items() <= axis.items()
            else axis
            for axis in axes
        ],
    }


def _from_sixth(data: Data) -> Data:
    """Files before revision 7 counted in the tensor axis's row what the context and expert axes transfer too. Their own
    rows say how often and how long, and how many bytes, of which a tensor rank was said to send its share. What layers
    that are computed again transfer again was in the step's term of recompute: nothing tells it apart there."""
    axes = data.get("axes")
    if not isinstance(axes, list) or not all(isinstance(axis, dict) for axis in axes):
        return data
    others = [axis for axis in axes if axis.get("name") in ("context", "expert")]
    numbers = ("degree", "times_per_step", "bytes_per_step", "exposed_s")
    inner = [*others, *(axis for axis in axes if axis.get("name") == "tensor")]
    if not others or not all(isinstance(axis.get(name), int | float) for axis in inner for name in numbers):
        return data
    return {**data, "axes": [_less(axis, others) if axis.get("name") == "tensor" else axis for axis in axes]}


# What the busiest rank of an expert axis sent, against the mean, in files before revision 7.
_SKEW = {"expert": 1.25}


def _less(tensor: Data, others: list[Data]) -> Data:
    share, names = (tensor["degree"] - 1) / tensor["degree"], {axis["name"] for axis in others}
    own = [word for word in str(tensor.get("collective")).split(", ") if word != "all-to-all" or "expert" not in names]
    return {
        **tensor,
        "collective": ", ".join(own) or "none",
        "times_per_step": tensor["times_per_step"] - sum(axis["times_per_step"] for axis in others),
        "bytes_per_step": tensor["bytes_per_step"]
        - share
        * sum(
            axis["bytes_per_step"] * _SKEW.get(axis["name"], 1.0) * axis["degree"] / max(1, axis["degree"] - 1)
            for axis in others
        ),
        "exposed_s": tensor["exposed_s"] - sum(axis["exposed_s"] for axis in others),
    }


# A step for each revision but the newest: from it to the next.
STEPS: dict[int, Callable[[Data], Data]] = {
    1: _from_first,
    2: _from_second,
    3: _from_third,
    4: _from_fourth,
    5: _from_fifth,
    6: _from_sixth,
}

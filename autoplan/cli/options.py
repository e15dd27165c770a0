"""Options that several commands share, and the text of ``--strategy`` as a dictionary."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.cli import completions
from autoplan.errors import StrategyError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset, a Hugging Face config.json, or file.py:factory.",
        autocompletion=completions.presets,
    ),
]
Gpus = Annotated[
    str,
    typer.Option(
        "--gpus",
        metavar="SPEC",
        help="8, 8xH100, 2x8xA100-80GB, 8xH100+8xA100, or a cluster file.",
        autocompletion=completions.specs,
    ),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", metavar="N", help="Samples in one step, over all GPUs.")
]
Sequence = Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens in one sample.")]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32, bf16, fp16, fp8, mxfp8 or nvfp4.",
        autocompletion=completions.precisions,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="adamw, adamw8bit, sgd, sgd-momentum, adafactor, lion, ...",
        autocompletion=completions.optimizers,
    ),
]
StrategyText = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="K=V,...",
        help="Force parts of the answer, or bound them: data=4,tensor=1|2,pipeline<=4.",
        autocompletion=completions.strategy,
    ),
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Price stages that run under torch.compile.")]
Headroom = Annotated[
    str | None, typer.Option("--headroom", metavar="SHARE", help="Memory to keep free on every GPU, such as 10%.")
]
MaxGpus = Annotated[int | None, typer.Option("--max-gpus", metavar="N", help="Use at most so many GPUs.")]
Stages = Annotated[
    str | None,
    typer.Option("--stages", metavar="0-15,16-31", help="The stages: spans of layers, or the first layer of each."),
]
InsideNode = Annotated[
    str | None,
    typer.Option(
        "--inside-node",
        metavar="AXIS,...",
        help="Axes whose groups cross no node: tensor,data.",
        autocompletion=completions.axes,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan to FILE; - is stdout.")
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN.json", help="A file that `autoplan plan -o` wrote; - is stdin.")
]

_WHOLE = (
    "data",
    "tensor",
    "pipeline",
    "virtual_stages",
    "context",
    "expert",
    "zero_stage",
    "micro_batch_size",
    "max_gpus",
)
_WORDS = ("schedule", "recompute", "memory_headroom", "stages", "inside_node")
_SWITCHES = ("sequence_parallel",)
STRATEGY_KEYS = (*_WHOLE, *_WORDS, *_SWITCHES)
# Keys that may have a range instead of one value.
RANGED = tuple(key for key in _WHOLE if key != "max_gpus")
_EXAMPLE = "--strategy data=4,tensor=2"
_PART = re.compile(r"\s*([^=<>!\s]+)\s*(<=|>=|!=|<|>|=)\s*([^=\s].*?)\s*")


def parse_strategy(texts: list[str] | None) -> dict[str, Any]:
    """``["data=4,tensor=2"]`` as ``{"data": 4, "tensor": 2}``.

    Checks the spelling and the type of each value; whether a degree is legal for the model is the planner's to say.
    Raises :class:`StrategyError`.
    """
    strategy: dict[str, Any] = {}
    for part in ",".join(texts or ()).split(","):
        if not part.strip():
            continue
        found = _PART.fullmatch(part)
        if found is None:
            raise StrategyError(f"strategy: {part.strip()!r} is not KEY=VALUE", attempt=_EXAMPLE)
        key, sign, value = found.groups()
        bounded = sign != "="
        if bounded and isinstance(strategy.get(key), str):  # at least and at most
            strategy[key] += f" {sign}{value}"
        elif key in strategy:
            raise StrategyError(f"strategy: `{key}` is given twice", attempt=_EXAMPLE)
        else:
            strategy[key] = _bound(key, f"{sign}{value}") if bounded else _value(key, value)
    return strategy


def with_limits(
    strategy: dict[str, Any],
    *,
    headroom: str | None = None,
    max_gpus: int | None = None,
    stages: str | None = None,
    inside_node: str | None = None,
) -> dict[str, Any]:
    """``strategy`` with the limits that have options of their own as its keys; given twice is refused."""
    given = {
        "memory_headroom": ("--headroom", headroom),
        "max_gpus": ("--max-gpus", max_gpus),
        "stages": ("--stages", stages),
        "inside_node": ("--inside-node", inside_node),
    }
    limits = {key: value for key, (_, value) in given.items() if value is not None}
    for key in limits:
        if key in strategy:
            raise StrategyError(
                f"`{key}` is given twice", attempt=f"{given[key][0]}, or `{key}` in --strategy, and not both"
            )
    return strategy | limits


def _bound(key: str, text: str) -> str:
    if key in RANGED:
        return text
    if key in STRATEGY_KEYS:
        raise StrategyError(
            f"strategy: `{key}` has no range",
            legal=f"{key}=VALUE; ranges are for {', '.join(RANGED)}",
            attempt=_EXAMPLE,
        )
    raise _unknown(key)


def _value(key: str, text: str) -> Any:
    if key in RANGED and "|" in text:
        return text
    if key in _WHOLE:
        try:
            return int(text)
        except ValueError:
            raise StrategyError(
                f"strategy: `{key}` is {text!r}", legal="a whole number", attempt=f"--strategy {key}=1"
            ) from None
    if key in _WORDS:
        return text
    if key in _SWITCHES:
        if text.lower() not in ("true", "false"):
            raise StrategyError(f"strategy: `{key}` is {text!r}", legal="true, false")
        return text.lower() == "true"
    raise _unknown(key)


def _unknown(key: str) -> StrategyError:
    near = difflib.get_close_matches(key, STRATEGY_KEYS, n=1)
    return StrategyError(
        f"strategy: unknown key `{key}`",
        legal=", ".join(STRATEGY_KEYS),
        attempt=f"did you mean `{near[0]}`?" if near else "",
    )


def check_cluster(gpus: str) -> None:
    """Refuse a cluster that is none before torch is imported; a bare count asks for this machine's GPUs."""
    if not gpus.strip().isdigit():
        from autoplan.cluster import Cluster

        Cluster.parse(gpus)

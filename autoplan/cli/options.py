"""Options that several commands share, and the text of ``--strategy`` as a dictionary."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.errors import AutoplanError, StrategyError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A preset, a Hugging Face config.json, or file.py:factory.")
]
Gpus = Annotated[
    str, typer.Option("--gpus", metavar="SPEC", help="8, 8xH100, 2x8xA100-80GB, 8xH100+8xA100, or a cluster file.")
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", metavar="N", help="Samples in one step, over all GPUs.")
]
Sequence = Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens in one sample.")]
Precision = Annotated[
    str | None, typer.Option("--precision", metavar="NAME", help="fp32, bf16, fp16, fp8, mxfp8 or nvfp4.")
]
Optimizer = Annotated[
    str, typer.Option("--optimizer", metavar="NAME", help="adamw, adamw8bit, sgd, sgd-momentum, adafactor, lion, ...")
]
StrategyText = Annotated[
    list[str] | None,
    typer.Option("--strategy", metavar="K=V,...", help="Force parts of the answer: data=4,tensor=2,zero_stage=1."),
]
Headroom = Annotated[
    str | None, typer.Option("--headroom", metavar="SHARE", help="Memory to keep free on every GPU, such as 10%.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan to FILE.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A file that `autoplan plan -o` wrote.")]

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
_WORDS = ("schedule", "recompute", "memory_headroom")
_SWITCHES = ("sequence_parallel",)
STRATEGY_KEYS = (*_WHOLE, *_WORDS, *_SWITCHES)
_EXAMPLE = "--strategy data=4,tensor=2"


def parse_strategy(texts: list[str] | None) -> dict[str, Any]:
    """``["data=4,tensor=2"]`` as ``{"data": 4, "tensor": 2}``.

    Checks the spelling and the type of each value; whether a degree is legal for the model is the planner's to say.
    Raises :class:`StrategyError`.
    """
    strategy: dict[str, Any] = {}
    for part in ",".join(texts or ()).split(","):
        if not part.strip():
            continue
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise StrategyError(f"strategy: {part.strip()!r} is not KEY=VALUE", attempt=_EXAMPLE)
        if key in strategy:
            raise StrategyError(f"strategy: `{key}` is given twice", attempt=_EXAMPLE)
        strategy[key] = _value(key, value)
    return strategy


def with_headroom(strategy: dict[str, Any], headroom: str | None) -> dict[str, Any]:
    """``strategy`` with ``--headroom`` as its key; given twice is refused."""
    if headroom is None:
        return strategy
    if "memory_headroom" in strategy:
        raise StrategyError("the memory headroom is given twice", attempt="--headroom, or --strategy memory_headroom=")
    return strategy | {"memory_headroom": headroom}


def _value(key: str, text: str) -> Any:
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
    near = difflib.get_close_matches(key, STRATEGY_KEYS, n=1)
    raise StrategyError(
        f"strategy: unknown key `{key}`",
        legal=", ".join(STRATEGY_KEYS),
        attempt=f"did you mean `{near[0]}`?" if near else "",
    )


def check_writable(path: Path | None, *, what: str = "plan") -> None:
    """Refuse a file that could not be written, before minutes are spent on what goes into it."""
    if path is None:
        return
    if path.is_dir():
        name = "cluster.toml" if what == "cluster file" else "plan.json"
        raise AutoplanError(f"cannot write the {what}: {path} is a folder", attempt=f"-o {path / name}")
    if not path.absolute().parent.is_dir():
        raise AutoplanError(f"cannot write the {what}: there is no folder {path.parent}", attempt="make it first")

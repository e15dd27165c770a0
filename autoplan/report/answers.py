"""What the commands print with ``--json``, as types: each object has ``schema`` 1, and only grows.

``plan``, ``predict`` and ``show`` print a plan (:mod:`autoplan.report.schema`), the first two with ``seconds``, or
:class:`Infeasible`; what a command cannot answer is :class:`Refused`. Bytes, seconds and FLOPs are
plain numbers, their unit in the name. No figure is NaN or infinite, which JSON has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from autoplan.explain.answer import Explained
from autoplan.explain.operators import Row
from autoplan.plan import SCHEMA_VERSION, Plan, Strategy
from autoplan.report.difference import Change
from autoplan.verification.types import Check, Numeric

_WHOLE = ConfigDict(extra="forbid")


class Answer(TypedDict):
    """What every object has."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    schema: Literal[1]


class OfPlan(Answer):
    """Of a plan file; ``unchecked`` says what could not be checked of an older one, "" of those of today."""

    unchecked: str


class Failure(TypedDict):
    """What the ``error: ...`` lines on stderr say, by line; empty where there is none of them."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    exit_code: int
    what: str
    where: str
    legal: str
    attempt: str


class Refused(Answer):
    """Bad input or a fault, of any command."""

    error: Failure


class Infeasible(Answer):
    """The answer no, with exit code 1. ``short_by_bytes``: null where no number of bytes is enough."""

    feasible: Literal[False]
    reason: str
    short_by_bytes: float | None
    term: str
    suggestions: list[str]


class Span(TypedDict):
    """A forward (F) or backward (B; or I and W, its halves) of a stage; from the beginning of the step."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


class After(TypedDict):
    """What a rank does after its last micro-batch."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    what: str
    start_s: float
    end_s: float


class Rank(TypedDict):
    """What a pipeline rank does in the step, in order, and the share of the step that it waits."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    rank: int
    idle_share: float
    actions: list[Span]
    tails: list[After]


class Timeline(TypedDict):
    """One step; ``not_attributed_s``: of the predicted step, in no stage's times."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    end_s: float
    not_attributed_s: float
    ranks: list[Rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Plan):
    """``show --timeline``: the plan, and its step."""

    timeline: Timeline


class Fits(Answer):
    feasible: Literal[True]
    gpus: int
    gpus_used: int
    global_batch: int
    strategy: Strategy
    memory_bytes: float
    peak_memory_bytes: float
    headroom_bytes: float
    roomiest: Strategy
    most_headroom_bytes: float


class Fewest(Answer):
    feasible: Literal[True]
    gpus: int
    device: str
    global_batch: int
    strategy: Strategy


class Family(TypedDict):
    """The best plan of a family; figures are null where none of it fits."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    family: str
    strategy: Strategy
    chosen: bool
    step_time_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: float
    bubble_fraction: float | None
    exposed_communication_s: float | None
    short_by_bytes: float


class Compared(Answer):
    feasible: bool
    families: list[Family]


class Operators(OfPlan):
    """``explain --operators``."""

    operators: list[Row]


class OneLayer(OfPlan):
    """``explain --layer NAME``."""

    layer: int
    name: str
    stage: int
    recompute: str
    parameters: int
    input_bytes: float
    collectives: list[str]
    operators: list[Row]


class Differences(Answer):
    """``unchecked``: by file, as of the others."""

    same: bool
    unchecked: dict[str, str]
    inputs: list[Change]
    forced: list[Change]
    strategy: list[Change]
    stages: list[Change]
    predicted: list[Change]
    time_terms: list[Change]
    memory_terms: list[Change]


class Simulated(OfPlan):
    """``left_out``: actions that the trace does not show; ``not_attributed_s``: of the predicted step."""

    model: str
    cluster: str
    strategy: str
    predicted_step_s: float
    end_s: float
    not_attributed_s: float
    actions: int
    left_out: int
    idle_share_of_stages: list[float]
    file: str | None


class Reported(OfPlan):
    file: str
    bytes: int


class Verified(OfPlan):
    equal: bool
    model: str
    strategy: Strategy
    gpus: int
    static: list[Check]
    numeric: Numeric
    seconds: dict[str, float]


class Emitted(OfPlan):
    directory: str
    files: list[str]


class Exported(OfPlan):
    """``lost``: what the target cannot express of the plan."""

    target: str
    files: dict[str, str]
    launch: str
    lost: list[str]


class Imported(Answer):
    tool: str
    strategy: dict[str, Any]
    gpus: int | None
    global_batch: int | None
    precision: str | None
    seq: int | None
    compiled: bool
    notes: list[str]


class Ran(Answer):
    """How a script ended: with the exit code of the process that failed first, or 0."""

    exit_code: int
    script: str
    device: Literal["cpu", "cuda"]
    processes: int


class Preset(TypedDict):
    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    name: str
    parameters: int
    source: str


class Models(Answer):
    models: list[Preset]


class Wire(TypedDict):
    """``bytes_per_s`` of one GPU in one direction."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    name: str
    bytes_per_s: float


class MeasuredWire(Wire):
    latency_s: float


class Kind(TypedDict):
    """``peak_flops`` by dtype."""

    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: dict[str, float]
    intra: Wire
    inter: Wire


class Clusters(Answer):
    devices: list[Kind]


class Finding(TypedDict):
    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    state: Literal["ok", "warn", "FAIL"]
    what: str
    said: str
    attempt: str


class Examined(Answer):
    healthy: bool
    findings: list[Finding]


class Fitted(TypedDict):
    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    name: str
    peak_flops: dict[str, float]
    memory_bytes_per_s: float
    launch_s: float
    gemm_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    memory_efficiency: float


class Error(TypedDict):
    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    median: float
    worst: float


class Measurement(TypedDict):
    __pydantic_config__ = _WHOLE  # type: ignore[misc]

    family: str
    name: str
    measured_s: float
    predicted_s: float
    error: float


class Calibrated(Answer):
    device: Fitted
    intra: MeasuredWire
    gpus: int
    errors: dict[str, Error]
    measurements: list[Measurement]


# What each command prints with --json.
ANSWERS: dict[str, Any] = {
    "plan": Plan | Infeasible,
    "predict": Plan | Infeasible,
    "fit": Fits | Infeasible,
    "min-gpus": Fewest | Infeasible,
    "compare": Compared,
    "explain": Explained | Operators | OneLayer,
    "show": Plan | Drawn,
    "simulate": Simulated,
    "report": Reported,
    "diff": Differences,
    "verify": Verified,
    "emit": Emitted,
    "export": Exported,
    "import": Imported,
    "run": Ran,
    "models": Models,
    "clusters": Clusters,
    "doctor": Examined,
    "calibrate": Calibrated,
}


def answers_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12): ``#/$defs/COMMAND`` is what a command prints, the whole is any command's answer.

    The commands are no properties of one object: no answer is keyed by command.
    """
    mode: Literal["serialization"] = "serialization"
    schemas, definitions = TypeAdapter.json_schemas(
        [(command, mode, TypeAdapter(answer | Refused)) for command, answer in ANSWERS.items()]
    )
    types = definitions["$defs"]
    for definition in types.values():
        if "properties" in definition:  # what has a default in Python is printed nevertheless
            definition["required"] = list(definition["properties"])
    for plan in ("Plan", "Drawn"):
        types[plan]["required"].remove("seconds")  # printed by `plan` and `predict` alone
        types[plan]["properties"]["schema"]["const"] = SCHEMA_VERSION
        types[plan]["properties"]["feasible"]["const"] = True
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "what autoplan's commands print with --json",
        "description": "#/$defs/COMMAND is what `autoplan COMMAND --json` prints",
        "anyOf": [{"$ref": f"#/$defs/{command}"} for command in ANSWERS],
        "$defs": {command: schemas[command, mode] for command in ANSWERS} | types,
    }

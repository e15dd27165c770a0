"""What ``explain`` says as data: the same answers, each with its figures, for ``--json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from autoplan.explain import axis_words, changes, reasons
from autoplan.explain.tables import layers_of, least_wait, ratio_of, work_shares
from autoplan.plan import Alternative, Plan, Strategy

if TYPE_CHECKING:
    from pydantic import ConfigDict

_STRICT: ConfigDict = {"extra": "forbid", "strict": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decision; ``text`` is its paragraph. ``mfu`` is of the GPUs' peak."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    text: str
    case: str
    model: str
    cluster: str
    gpus: int
    gpus_used: int
    strategy: Strategy
    precision: str
    optimizer: str
    global_batch: int
    step_time_s: float
    tokens_per_s: float
    model_tflops_per_gpu: float
    mfu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """What is split: ``exposed_share`` is of the step; ``among`` names the first group of GPUs."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    degree: int
    splits: str
    collective: str
    when: str
    link: str
    among: str
    times_per_step: int
    bytes_per_step: float
    exposed_s: float
    exposed_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """``work_share`` of the model's FLOPs (0 where the plan does not say); seconds are of one micro-batch;
    ``memory_share`` is the peak of ``capacity_bytes``."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    stage: int
    layers: str
    first_layer: int
    last_layer: int
    parameters: int
    work_share: float
    forward_s: float
    backward_s: float
    peak_memory_bytes: float
    capacity_bytes: float
    memory_share: float
    memory_terms: dict[str, float]
    recompute: dict[str, int]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Shares of the step that a GPU waits for others or for what it sends: on average, and the one with the most to
    do."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    average_share: float
    least_share: float
    schedule: str
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A micro-batch's computation against its communication; ``ratio`` is None where nothing is sent."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    micro_batch_size: int
    computes_s: float
    communicates_s: float
    ratio: float | None
    why_this_size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatWouldChange:
    """``searched``: each threshold is a search's answer; else plans are compared with their stages as they are, and
    ``basis`` says so."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    searched: bool
    basis: str
    thresholds: tuple[changes.Threshold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """``compromise``: what the plan takes more than the fastest candidate, and by which rule; "" where nothing."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    text: str
    status: str
    gap: float
    lower_bound_s: float
    simulated_gap: float
    considered: int
    pruned_by_memory: int
    pruned_by_bound: int
    solved: int
    compromise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """``explain --json``. ``unchecked``: what could not be checked of an older file, "" of those of today."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal[1] = 1
    decision: Decided
    axes: tuple[AxisRow, ...]
    stages: tuple[StageRow, ...]
    bubble: Bubble
    micro_batch: Ratio
    time_terms: dict[str, float]
    alternatives: tuple[Alternative, ...]
    would_change: WhatWouldChange
    proof: Proven
    assumptions: tuple[str, ...]
    unchecked: str


def answer(plan: Plan) -> dict[str, Any]:
    """The plan explained, as JSON-ready data."""
    return asdict(
        Explained(
            decision=_decision(plan),
            axes=tuple(_axes(plan)),
            stages=tuple(_stages(plan)),
            bubble=_bubble(plan),
            micro_batch=_ratio(plan),
            time_terms=dict(plan.predicted.time_terms),
            alternatives=plan.alternatives,
            would_change=_would_change(plan),
            proof=_proof(plan),
            assumptions=plan.assumptions,
            unchecked=plan.unchecked,
        )
    )


def _decision(plan: Plan) -> Decided:
    predicted = plan.predicted
    return Decided(
        text=" ".join(reasons.decision(plan)[1:]),
        case=plan.case,
        model=plan.model.name,
        cluster=plan.cluster.spec,
        gpus=plan.gpus,
        gpus_used=plan.gpus_used,
        strategy=plan.strategy,
        precision=plan.precision,
        optimizer=plan.optimizer,
        global_batch=plan.global_batch,
        step_time_s=predicted.step_time_s,
        tokens_per_s=predicted.tokens_per_s,
        model_tflops_per_gpu=predicted.model_tflops_per_gpu,
        mfu=predicted.mfu,
    )


def _axes(plan: Plan) -> list[AxisRow]:
    return [
        AxisRow(
            **asdict(axis),
            when=axis_words.when(plan, axis),
            among=axis_words.members(plan, axis),
            exposed_share=axis.exposed_s / plan.predicted.step_time_s,
        )
        for axis in plan.axes
    ]


def _stages(plan: Plan) -> list[StageRow]:
    rows = []
    for index, (stage, work) in enumerate(zip(plan.stages, work_shares(plan), strict=True)):
        capacity = plan.cluster.memory_of(stage)
        rows.append(
            StageRow(
                stage=index,
                layers=layers_of(plan, stage),
                first_layer=stage.first_layer,
                last_layer=stage.last_layer,
                parameters=stage.parameters,
                work_share=work,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                peak_memory_bytes=stage.peak_memory_bytes,
                capacity_bytes=capacity,
                memory_share=stage.peak_memory_bytes / capacity,
                memory_terms=dict(stage.memory_terms),
                recompute=dict(stage.recompute),
                device=stage.device,
            )
        )
    return rows


def _bubble(plan: Plan) -> Bubble:
    predicted, strategy = plan.predicted, plan.strategy
    return Bubble(
        average_share=predicted.bubble_fraction,
        least_share=least_wait(plan),
        schedule=strategy.schedule if strategy.pipeline > 1 else "",
        micro_batches=strategy.micro_batches,
    )


def _ratio(plan: Plan) -> Ratio:
    computes_s, sent_s, why = ratio_of(plan)
    return Ratio(
        micro_batch_size=plan.strategy.micro_batch_size,
        computes_s=computes_s,
        communicates_s=sent_s,
        ratio=computes_s / sent_s if sent_s > 0 else None,
        why_this_size=why,
    )


def _would_change(plan: Plan) -> WhatWouldChange:
    return WhatWouldChange(
        searched=bool(plan.other_answers),
        basis=changes.basis(plan),
        thresholds=changes.thresholds(plan),
    )


def _proof(plan: Plan) -> Proven:
    proven = plan.certificate
    return Proven(
        text=" ".join(reasons.proof(plan)[1:]),
        status=proven.status,
        gap=proven.gap,
        lower_bound_s=proven.lower_bound_s,
        simulated_gap=proven.simulated_gap,
        considered=proven.considered,
        pruned_by_memory=proven.pruned_by_memory,
        pruned_by_bound=proven.pruned_by_bound,
        solved=proven.solved,
        compromise=reasons.compromise(plan),
    )

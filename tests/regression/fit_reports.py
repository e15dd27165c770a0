"""``data/fit_cases.toml``: users' reports of what fitted and what did not, as configurations of the memory model."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any

from autoplan.cluster import Cluster, Device
from autoplan.cost_models.memory import stage_memory
from autoplan.cost_models.recipes import Recipe, recipe
from autoplan.layers.types import LayerKind, Operator, Parameter
from autoplan.plan import Strategy
from tests.regression.peaks import DEEPSPEED_BUCKET_BYTES, every_second_product, with_loss
from tests.regression.runs import DATA
from tests.regression.transformer import Shape, block, embedding, head

# One rank's share of the layers without blocks is split in as many pieces: only their sum matters.
PIECES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One case: ``row`` as the file has it, ``model`` the entry of its table of models."""

    row: dict[str, Any]
    model: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @property
    def usable(self) -> bool:
        return bool(self.row["label"] == "usable")

    @property
    def ran_out(self) -> bool:
        return bool(self.row["reported"] == "oom")

    @property
    def device(self) -> Device:
        device = Cluster.parse(f"1x{self.row['gpu']}").device
        memory = self.row.get("memory_gib")
        return dataclasses.replace(device, memory_bytes=memory * 2**30) if memory else device

    @property
    def peak_bytes(self) -> float | None:
        """What the source saw, if it says."""
        if "peak_gib" in self.row:
            return float(self.row["peak_gib"]) * 2**30
        return float(self.row["peak_gb"]) * 1e9 if "peak_gb" in self.row else None

    @property
    def strategy(self) -> Strategy:
        keys = (
            "data",
            "tensor",
            "pipeline",
            "context",
            "zero_stage",
            "micro_batch_size",
            "micro_batches",
            "sequence_parallel",
        )
        return Strategy(**{key: self.row[key] for key in keys if key in self.row})


def read_reports() -> list[Report]:
    data = tomllib.loads((DATA / "fit_cases.toml").read_text(encoding="utf-8"))
    return [Report(row=row, model=data["models"][row["model"]]) for row in data["case"]]


def predict(report: Report) -> dict[str, float]:
    """Bytes by term on the fullest stage."""
    strategy = report.strategy
    peaks = []
    for stage, kinds in enumerate(_stages(report)):
        policies = [report.row.get("recompute", "none") if _is_block(kind) else "none" for kind in kinds]
        if policies and report.row.get("recompute", "").startswith("every second product"):
            policies = ["none"] * len(kinds)
        terms = stage_memory(
            kinds,
            strategy=strategy,
            stage=stage,
            recipe=_recipe(report),
            device=report.device,
            recompute=policies,
        )
        if report.row.get("engine") == "deepspeed":
            terms["communication_buffers"] += DEEPSPEED_BUCKET_BYTES
        _return_gathered(report, terms, kinds)
        peaks.append(terms)
    return max(peaks, key=lambda terms: sum(terms.values()))


def _recipe(report: Report) -> Recipe:
    """Without what stands on the host: offloaded states cost a GPU nothing but the layer that is there."""
    full = recipe(report.row["precision"], report.row.get("optimizer", "adamw"))
    away = report.row.get("on_host", [])
    if "weights" in away:
        full = dataclasses.replace(full, weights=0.0)
    if "gradients" in away:
        full = dataclasses.replace(full, gradients=0.0)
    if "optimizer" in away:
        full = dataclasses.replace(full, master_weights=0.0, optimizer_state=0.0, step_temporary=0.0)
    return full


def _return_gathered(report: Report, terms: dict[str, float], kinds: list[LayerKind]) -> None:
    """Offloaded weights come back two layers at a time, and their gradients leave one layer late."""
    away = report.row.get("on_host", [])
    largest = max(kind.parameter_elements for kind in kinds)
    if "weights" in away:
        terms["gather_window"] += 2 * 2.0 * largest
    if "gradients" in away:
        terms["gradient_window"] += 2.0 * largest


def _stages(report: Report) -> list[list[LayerKind]]:
    if report.model["family"] == "opaque":
        return [[*_opaque(report), *_frozen(report)]]
    shape = _shape(report)
    stages = report.strategy.pipeline
    middle = _block(report, shape)
    counts = [shape.layers // stages + (stage > stages - 1 - shape.layers % stages) for stage in range(stages)]
    kinds = [[middle] * count for count in counts]
    first, last = embedding(shape), with_loss(head(shape), report.row.get("loss", "eager"))
    if "adapter_elements" in report.row:
        first, last = _still(first), _still(last)
    kinds[0].insert(0, first)
    kinds[-1].append(last)
    kinds[0].extend(_frozen(report))
    return kinds


def _block(report: Report, shape: Shape) -> LayerKind:
    kind = block(shape)
    policy = report.row.get("recompute", "none")
    if policy.startswith("every second product"):
        kind = every_second_product(shape, kind, compiled=policy.endswith("compiled"))
    if "adapter_elements" not in report.row:
        return kind
    elements = int(report.row["adapter_elements"] / shape.layers)
    adapter = Parameter(role="adapter", elements=elements, element_bytes=2)
    return dataclasses.replace(_still(kind), parameters=(*_still(kind).parameters, adapter))


def _is_block(kind: LayerKind) -> bool:
    return len(kind.operators) > 5


def _shape(report: Report) -> Shape:
    strategy = report.strategy
    return Shape(
        **report.model,
        seq=report.row["seq"],
        flash=report.row.get("flash", True),
        dropout=False,
        tensor=strategy.tensor,
        sequence_parallel=strategy.sequence_parallel,
    )


def _still(kind: LayerKind) -> LayerKind:
    parameters = tuple(dataclasses.replace(parameter, trainable=False) for parameter in kind.parameters)
    return dataclasses.replace(kind, parameters=parameters)


def _opaque(report: Report) -> list[LayerKind]:
    """A model of which only its size and what one sample keeps are known, in equal layers."""
    layers = int(report.model["layers"])
    kept = Operator(
        name="layer",
        target="layer",
        kind="other",
        dtype="bf16",
        saved_bytes=report.model["bytes_per_sample"] / layers,
    )
    weight = Parameter(role="weight", elements=int(report.model["elements"] / layers), element_bytes=2)
    return [LayerKind(operators=(kept,), parameters=(weight,))] * layers


def _frozen(report: Report) -> list[LayerKind]:
    """Weights that stand beside the model and never train: a reference policy, a backbone."""
    elements = int(report.row.get("frozen_elements", 0) / PIECES)
    weight = Parameter(role="frozen", elements=elements, element_bytes=2, trainable=False)
    return [LayerKind(operators=(), parameters=(weight,))] * (PIECES if elements else 0)

"""Megatron's own tests as configurations of the memory model: what its last rank should read off the allocator.

*Allocated* between steps: states (bf16 weights, fp32 gradients, master weights and moments, the last two divided by
the data degree as its distributed optimizer does), the workspaces, and a pipeline's boundary: of each chunk the input
and its gradient, and one in flight, until the next step's replace them (the 7B model's 8 chunks hold 16 and 20 tensors
of 64 MiB, the small one's 3 hold 7 of 4). *Peak*: also the activations in flight, which the inputs are part of.
Experts: :mod:`tests.regression.megatron_experts`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any

from autoplan.cluster import Cluster
from autoplan.cost_models.memory import count_elements, stage_memory
from autoplan.cost_models.recipes import recipe
from autoplan.layers.types import LayerKind
from autoplan.plan import Strategy
from tests.regression.megatron_experts import Experts, with_experts
from tests.regression.peaks import BLOCK_OPERATORS, with_loss
from tests.regression.runs import DATA, read_rows
from tests.regression.transformer import Shape, block, embedding, head

GPUS = 8
GPT2_VOCAB = 50257
MIB = 2**20
# cuBLAS workspaces of forward's and autograd's stream, in MiB each: CUBLAS_WORKSPACE_CONFIG=:4096:8, or PyTorch's
# default (:4096:2:16:8 before Hopper). Transformer Engine has one of its own.
STREAMS = 2
WORKSPACE_DETERMINISTIC = 32.0
WORKSPACE_DEFAULT = {"A100": 8.125, "H100": 32.0}
WORKSPACE_ENGINE = {"A100": 4.0, "H100": 32.0}
EXPERT_STREAMS = 4  # the engine's grouped products run on four streams of their own
STATES = ("weights", "gradients", "master_weights", "optimizer_state", "workspace")
OUTSIDE = ("context", "communication_buffers", "allocator_reserve")  # of "allocated"; gradients are reduced in place
READING: dict[str, Any] = tomllib.loads((DATA / "megatron_ci.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One row of ``data/megatron_ci_memory.csv``; bytes."""

    row: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.row['test']} {self.file}"

    @property
    def file(self) -> str:
        return self.row["file"].rsplit("/", 1)[-1]

    @property
    def allocated(self) -> float:
        return float(self.row["mem_allocated_bytes"])

    @property
    def peak(self) -> float:
        return float(self.row["mem_max_allocated_bytes"])

    def count(self, key: str, default: int = 1) -> int:
        return int(self.row[key]) if self.row[key] else default

    def said(self, key: str) -> bool:
        return self.row[key] == "true"


def read_readings() -> tuple[list[Reading], dict[str, str]]:
    """Dense rows that state enough, and why each other test is left out, by name."""
    kept, dropped = [], {}
    for row in read_rows("megatron_ci_memory"):
        reading = Reading(row=row)
        reason = _why_not(reading)
        if reason:
            dropped[reading.name] = reason
        else:
            kept.append(reading)
    return kept, dropped


def _why_not(reading: Reading) -> str:
    if reading.said("use-megatron-fsdp"):
        return "buffers of Megatron's FSDP"
    return next((why for part, why in READING["left_out"].items() if part in reading.row["test"]), "")


def predict(reading: Reading) -> tuple[float, float]:
    """Bytes allocated between steps, and at the peak."""
    shape, strategy = _shape(reading), _strategy(reading)
    experts = _experts(reading)
    middle = with_experts(block(shape), shape, experts) if experts else block(shape)
    layers = shape.layers // strategy.pipeline
    kinds = [middle] * layers + [_head(reading, shape)]
    if strategy.pipeline == 1:
        kinds.insert(0, embedding(shape))
    policy = reading.row["recompute-granularity"] or "none"
    terms = stage_memory(
        kinds,
        strategy=strategy,
        stage=strategy.pipeline - 1,
        recipe=recipe("bf16-megatron"),
        device=Cluster.parse(f"1x{'A100-80GB' if reading.row['gpu'] == 'A100' else 'H100'}").device,
        recompute=[policy if len(kind.operators) > BLOCK_OPERATORS else "none" for kind in kinds],
    )
    terms["workspace"] = _workspace(reading)
    buffer = _attention_buffer(reading, shape, strategy)
    peak = sum(value for name, value in terms.items() if name not in OUTSIDE) + buffer
    row = 2.0 * strategy.micro_batch_size * shape.seq * shape.hidden / (shape.spread * strategy.context)
    between = sum(terms[name] for name in STATES) + buffer + _copied_weights(reading, kinds)
    if strategy.pipeline == 1:
        return between, peak
    return between + (2 * strategy.virtual_stages + 1) * row, peak + 2 * row


def _attention_buffer(reading: Reading, shape: Shape, strategy: Strategy) -> float:
    """Megatron's own attention adds its scores into a buffer that it keeps: one layer's scores in 16 bits."""
    if reading.row["transformer-impl"] != "local" or reading.row["test"] in READING["recorded_fused"]["tests"]:
        return 0.0
    return 2.0 * strategy.micro_batch_size * (shape.heads // strategy.tensor) * shape.seq**2


def _copied_weights(reading: Reading, kinds: list[LayerKind]) -> float:
    """Tests of Megatron's own layers that resume, or lack Transformer Engine, hold 2 bytes a parameter more between
    steps: to 4% on all of them. What keeps a 16-bit copy of the weights their recipes don't say."""
    name = reading.row["test"]
    own = reading.row["transformer-impl"] == "local" and "_te_" not in name
    own = own and name not in READING["recorded_fused"]["tests"]
    return 2.0 * count_elements(kinds).total if own and ("resume" in name or "uninstall_te" in name) else 0.0


def _experts(reading: Reading) -> Experts | None:
    if not reading.row["num-experts"]:
        return None
    count = reading.count("num-experts")
    return Experts(
        count=count,
        visited=reading.count("moe-router-topk"),
        local=count // reading.count("expert-model-parallel-size"),
        tensor=_expert_tensor(reading),
        gated=reading.said("swiglu"),
    )


def _expert_tensor(reading: Reading) -> int:
    return reading.count("expert-tensor-parallel-size", reading.count("tensor-model-parallel-size"))


def _workspace(reading: Reading) -> float:
    gpu, name = reading.row["gpu"], reading.row["test"]
    free = any(part in name for part in READING["not_deterministic"]["names"])
    free = free and not any(part in name for part in READING["not_deterministic"]["but"])
    stream = WORKSPACE_DEFAULT[gpu] if free else WORKSPACE_DETERMINISTIC
    local = reading.row["transformer-impl"] == "local" and "_te_" not in name
    engine = 0.0 if local else WORKSPACE_ENGINE[gpu]
    if reading.row["num-experts"] and any(part in name for part in READING["grouped"]["names"]):
        engine *= 1 + EXPERT_STREAMS
    return (STREAMS * stream + engine) * MIB


def _head(reading: Reading, shape: Shape) -> LayerKind:
    fused = "cross_entropy_loss_fusion" in reading.row["test"]
    kind = with_loss(head(shape), "megatron, fused" if fused else "megatron")
    if not reading.said("untie-embeddings-and-output-weights"):
        return kind
    return dataclasses.replace(
        kind, parameters=tuple(dataclasses.replace(parameter, shared="") for parameter in kind.parameters)
    )


def _strategy(reading: Reading) -> Strategy:
    tensor, pipeline = reading.count("tensor-model-parallel-size"), reading.count("pipeline-model-parallel-size")
    context, samples = reading.count("context-parallel-size"), reading.count("micro-batch-size")
    data = GPUS // (tensor * pipeline * context)
    chunk = reading.count("num-layers-per-virtual-pipeline-stage", 0)
    return Strategy(
        data=data,
        context=context,
        expert=max(1, reading.count("expert-model-parallel-size") * _expert_tensor(reading) // tensor),
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=reading.count("num-layers") // pipeline // chunk if chunk else 1,
        zero_stage=int(reading.said("use-distributed-optimizer")),
        micro_batch_size=samples,
        micro_batches=max(1, reading.count("global-batch-size") // (data * samples)),
        sequence_parallel=reading.said("sequence-parallel") and tensor > 1,
    )


def _shape(reading: Reading) -> Shape:
    """Megatron pads the vocabulary to 128 for each tensor rank, and rounds 8h/3 down to 64 for a gated MLP."""
    strategy = _strategy(reading)
    hidden, heads = reading.count("hidden-size"), reading.count("num-attention-heads")
    gated, pad = reading.said("swiglu"), 128 * strategy.tensor
    unfused = reading.row["attention-backend"] == "unfused" or reading.row["transformer-impl"] == "local"
    recorded = {"test": reading.row["test"], "file": reading.file} in READING["recorded_unfused"]
    return Shape(
        layers=reading.count("num-layers"),
        hidden=hidden,
        ffn=reading.count("ffn-hidden-size", 8 * hidden // 3 // 64 * 64 if gated else 4 * hidden),
        heads=heads,
        kv_heads=reading.count("num-query-groups", heads),
        vocab=-(-reading.count("vocab-size", GPT2_VOCAB) // pad) * pad,
        seq=reading.count("seq-length"),
        family="llama" if gated else "gpt",
        flash=not (unfused or recorded),
        tensor=strategy.tensor,
        sequence_parallel=strategy.sequence_parallel,
    )

"""What the memory model says of a published run: the stages of its pipeline, priced by the conventions of its source.

torchtitan (FSDP2, fp32 shards gathered as bf16) reads what the allocator holds (*reserved*), BLOOM's grid (DeepSpeed's
ZeRO-1 pipeline engine) *nvidia-smi*, context included.

The logits decide many of these peaks. For each logit, at the moment of the loss's backward:

- *eager* cross entropy keeps the fp32 log-probabilities (4 bytes) and holds two fp32 gradients (8) as it goes back;
- *parallel*: the vocabulary is split over the tensor axis and the loss is a chain of eager operators on fp32 values:
  ``(one_hot + exp(x)) * gradient`` is one temporary more (12 passing);
- *compiled* (torchtitan compiles its loss since early 2025): the 16-bit logits stay (2), their gradient comes back in
  16 bits (2), and nothing in fp32 is ever whole;
- *megatron*: fp32 probabilities are kept (4) and become the gradient in place, which is cast to 16 bits (2);
  *fused*, its scripted kernels write to another fp32 tensor (4 more).
"""

from __future__ import annotations

import dataclasses
import re

from autoplan.cost_models.memory import count_elements, measured_bytes, recipe, stage_memory
from autoplan.cost_models.software import COMPILED, COMPILED_ASYNC_TENSOR
from autoplan.layers.types import LayerKind, Operator
from tests.regression.runs import Run, read_rows, split_stages
from tests.regression.transformer import Shape

BLOCK_OPERATORS = 5  # a block has more; embedding and head have fewer
COMPILED_LOSS_SINCE = "202502"
# Its ZeRO stages reduce and gather through a bucket each of 5e8 16-bit elements.
DEEPSPEED_BUCKET_BYTES = 2 * 5e8 * 2.0
# loss -> bytes a logit: (kept for the backward, moved by it)
LOSSES = {
    "eager": (4.0, 8.0),
    "parallel": (4.0, 12.0),
    "compiled": (2.0, 2.0),
    "megatron": (4.0, 2.0),
    "megatron, fused": (4.0, 6.0),
}
_ROWS = {row["id"]: row for row in read_rows("measurements")}
CONVENTIONS = {"torchtitan": "reserved", "bloom_grid": "nvidia-smi"}


def predict_peak_bytes(run: Run) -> float:
    """The peak as the source of ``run`` reads it."""
    return measured_bytes(predict_memory(run), CONVENTIONS[run.source], strategy=run.strategy)


def predict_memory(run: Run) -> dict[str, float]:
    """Bytes by term on the fullest stage."""
    recipes = {"bloom_grid": {"bf16": "bf16-deepspeed", "fp16": "fp16"}, "torchtitan": {}}
    precision = recipes[run.source].get(run.shape.dtype, "fp32")
    peaks = [_stage_memory(run, kinds, stage, precision) for stage, kinds in enumerate(split_stages(run))]
    return max(peaks, key=lambda terms: sum(terms.values()))


def _stage_memory(run: Run, kinds: list[LayerKind], stage: int, precision: str) -> dict[str, float]:
    policies = [run.recompute if len(kind.operators) > BLOCK_OPERATORS else "none" for kind in kinds]
    window = 0.0
    if run.source == "torchtitan":
        kinds[-1] = with_loss(kinds[-1], loss_of(run))
    if run.recompute == "every second product":
        compiled = run.software in (COMPILED, COMPILED_ASYNC_TENSOR)
        thinned = [
            every_second_product(run.shape, kind, compiled=compiled) if policy != "none" else kind
            for kind, policy in zip(kinds, policies, strict=True)
        ]
        samples = run.strategy.micro_batch_size
        window = max((a.saved_bytes - b.saved_bytes) * samples for a, b in zip(kinds, thinned, strict=True))
        kinds, policies = thinned, ["none"] * len(kinds)
    terms = stage_memory(
        kinds,
        strategy=run.strategy,
        stage=stage,
        recipe=recipe(precision),
        device=run.cluster.device,
        recompute=policies,
    )
    terms["recompute_window"] += max(0.0, window)
    if run.source == "bloom_grid":
        # DeepSpeed's ZeRO-1: buckets, and its shard of gradients in fp32.
        terms["communication_buffers"] += DEEPSPEED_BUCKET_BYTES
        terms["gradients"] += 4.0 * count_elements(kinds).total / run.strategy.data
    return terms


def loss_of(run: Run) -> str:
    """Which of :data:`LOSSES` a run of torchtitan used: the date of its benchmark says."""
    if run.strategy.tensor > 1:
        return "parallel"
    date = re.search(r"20\d{4}", _ROWS[run.id]["where_found"])
    return "compiled" if date and date[0] >= COMPILED_LOSS_SINCE else "eager"


def with_loss(head: LayerKind, loss: str) -> LayerKind:
    """``head`` with another loss: ``float`` keeps nothing, since log-softmax keeps its own output."""
    kept, moved = LOSSES[loss]
    logits = head.operators[-1].saved_bytes / 4.0

    def changed(op: Operator) -> Operator:
        if op.name == "float":
            return dataclasses.replace(op, saved_bytes=0.0, read_bytes=0.0, written_bytes=0.0)
        if op.kind == "cross_entropy":
            return dataclasses.replace(
                op, saved_bytes=kept * logits, read_bytes=moved / 2 * logits, written_bytes=moved / 2 * logits
            )
        return op

    return dataclasses.replace(head, operators=tuple(changed(op) for op in head.operators))


def every_second_product(shape: Shape, kind: LayerKind, *, compiled: bool) -> LayerKind:
    """What torchtitan's per-operator policy keeps of a llama block: its input, attention's output, and the products
    numbered 1, 3, 5, 7 of q, k, v, projection, gate, up, down. The compiler drops what no backward reads: the last."""
    one = 2.0 * shape.seq / shape.tensor  # bytes of a column
    kept = {
        "qkv": one * (shape.heads + shape.kv_heads) * shape.width,
        "gate": one * shape.ffn,
        "down": 0.0 if compiled else 2.0 * shape.seq * shape.hidden / shape.spread,
    }
    operators = [
        op if op.kind == "attention" else dataclasses.replace(op, saved_bytes=kept.get(op.name, 0.0))
        for op in kind.operators
    ]
    operators[-1] = dataclasses.replace(operators[-1], saved_bytes=kind.input_bytes)
    return dataclasses.replace(kind, operators=tuple(operators))

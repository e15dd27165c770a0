"""Published runs as data, and what the cost models say of each.

``data/measurements.csv`` holds the dense runs of eight sources that state micro-batch, degrees and step time, with the
place where each was read, ``data/megatron_bridge.csv`` those of NVIDIA's tables of 2025 and 2026, with its mixtures of
experts. Left out: rows whose source or transcription is marked suspect, adapters, context parallelism, and torchtitan's
row-wise fp8 (its authors flag that baseline as slow). ``layer_times.csv`` and ``analytic_memory.csv`` are Korthikanti
et al. 2022's tables.

How a source's software behaves is its profile in :mod:`autoplan.cost_models.software`; what a source does not state is
assumed for all of its rows, in the constants below.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from autoplan import schedules
from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, all_reduce_s, boundary_send_s, dispatch_s, tensor_time
from autoplan.cost_models.compute import (
    OperatorTime,
    gradient_accumulation_s,
    layer_time,
    operator_time,
    optimizer_step_s,
    recompute_s,
    routing_s,
)
from autoplan.cost_models.contention import Held, held_by_dispatch, held_by_layer, held_by_ring, held_by_send
from autoplan.cost_models.data_parallel import DataParallelTime, data_parallel_time
from autoplan.cost_models.memory import count_elements, recipe
from autoplan.cost_models.schedule import simulate
from autoplan.cost_models.software import (
    BRIDGE,
    BRIDGE_GRAPHS,
    COMPILED,
    COMPILED_ASYNC_TENSOR,
    DEEPSPEED_2021,
    DEEPSPEED_2022,
    DEEPSPEED_ZERO_3,
    EAGER,
    EAGER_FLASH_1,
    MEGATRON_2021,
    MEGATRON_2022,
    ONEFLOW,
    TRANSFORMER_ENGINE,
    Software,
)
from autoplan.layers.types import LayerKind
from autoplan.plan import Strategy
from tests.regression.mixture import Mixture, mixture_block
from tests.regression.transformer import Shape, block, embedding, head

DATA = Path(__file__).parent / "data"
FSDP = ("llm_foundry", "torchtitan")
FUSED_ATTENTION = (*FSDP, "nemo_24", "megatron_bridge")
SOFTWARE = {
    "korthikanti2022": MEGATRON_2022,
    "nemo_24": TRANSFORMER_ENGINE,
    "llm_foundry": EAGER_FLASH_1,
    "bloom_grid": DEEPSPEED_2022,
    "bigscience_v100": DEEPSPEED_2021,
}
DEEPSPEED = ("bloom_grid", "bigscience_v100")
TRANSFORMER_ENGINES = ("nemo_24", "megatron_bridge")  # distributed optimizer and sequence parallelism by default
NVLINK_DOMAIN = 64  # of 72 GPUs: jobs take powers of two
WHOLE_SENDS = (*DEEPSPEED, "dlperf_v100")
PADDED = DEEPSPEED
VOCABULARY_MULTIPLE = 128  # Megatron pads the table to this, times the tensor degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of ``data/measurements.csv``."""

    id: str
    source: str
    model: str  # as the source calls it
    cluster: Cluster
    shape: Shape
    strategy: Strategy
    virtual: int
    recompute: str
    software: Software
    gradient_bytes: float  # of one element on the wire
    peak_memory_gb: float | None
    step_time_s: float
    mixture: Mixture | None = None


def read_rows(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_runs() -> list[Run]:
    """All runs that finished a step."""
    rows = read_rows("measurements") + read_rows("megatron_bridge")
    return [_run(row) for row in rows if row["step_time_s"]]


def read_out_of_memory() -> list[Run]:
    """Runs that did not fit."""
    return [_run(row) for row in read_rows("measurements") if "[OOM" in row["notes"]]


def _run(row: dict[str, str]) -> Run:
    def count(key: str, default: int = 1) -> int:
        return int(row[key]) if row[key] else default

    notes = row["notes"].lower()
    strategy = Strategy(
        data=count("dp"),
        tensor=count("tp"),
        pipeline=count("pp"),
        zero_stage=count("zero_stage", 1 if row["source"] in TRANSFORMER_ENGINES else 0),
        expert=int(row.get("ep") or 1),
        micro_batch_size=count("micro_batch"),
        micro_batches=count("global_batch") // (count("dp") * count("micro_batch")),
        sequence_parallel=row["sequence_parallel"] == "1" or row["source"] in TRANSFORMER_ENGINES,
    )
    fsdp = row["source"] in FSDP
    multiple = VOCABULARY_MULTIPLE * strategy.tensor if row["source"] in PADDED else 1
    shape = Shape(
        **{key: count(key) for key in ("layers", "hidden", "ffn", "heads", "seq")},
        vocab=math.ceil(count("vocab") / multiple) * multiple,
        kv_heads=count("kv_heads", count("heads")),
        head_dim=count("head_dim", 0),
        family=row["family"],
        fused=row["source"] != "torchtitan",
        flash=row["source"] in FUSED_ATTENTION,
        dropout=row["source"] not in FUSED_ATTENTION,
        tensor=strategy.tensor,
        sequence_parallel=strategy.sequence_parallel,
        dtype=row["precision"],
    )
    # The same paper measures two systems: its own and DeepSpeed's ZeRO-3 of 2021, which overlapped little.
    zero_of_2021 = row["source"] == "narayanan2021" and strategy.zero_stage == 3
    return Run(
        id=row["id"],
        source="narayanan2021, ZeRO-3" if zero_of_2021 else row["source"],
        model=row["model"],
        cluster=_cluster(row),
        shape=shape,
        strategy=strategy,
        virtual=count("vpp"),
        recompute=_policy(row),
        software=_software(row),
        gradient_bytes=2.0 if "mp=pure" in notes or not fsdp else 4.0,
        step_time_s=float(row["step_time_s"] or 0),
        mixture=_mixture(row),
        peak_memory_gb=float(row["peak_mem_gb"]) if row["peak_mem_gb"] else None,
    )


def _mixture(row: dict[str, str]) -> Mixture | None:
    if row["family"] != "moe":
        return None
    latent = row["model"].startswith(("DeepSeek", "Kimi"))
    return Mixture(
        experts=int(row["experts"]),
        topk=int(row["topk"]),
        ffn=int(row["ffn"]),
        parallel=min(int(row["ep"]), int(row["dp"]) * int(row["tp"])),
        shared_ffn=int(row["ffn"]) if latent else 0,
        latent=latent,
        window=128 if row["model"].startswith("GPT OSS") else 0,
        biases=row["model"].startswith("GPT OSS"),
    )


def _software(row: dict[str, str]) -> Software:
    if row["source"] == "megatron_bridge":
        release = re.search(r'"(\d\d\.\d\d)', row["where_found"])
        # Of 26.06 on, the tables of H100, B200, B300 and Kimi K2 repeat 26.04's times; the other recipes of the
        # rack-scale machines changed.
        changed = row["gpu"].startswith("GB") and not row["model"].startswith("Kimi")
        graphs = release and release[1] >= "26.06" and changed
        return BRIDGE_GRAPHS if graphs else BRIDGE
    if row["source"] in SOFTWARE:
        return SOFTWARE[row["source"]]
    if row["source"] == "narayanan2021":
        return DEEPSPEED_ZERO_3 if row["zero_stage"] == "3" else MEGATRON_2021
    if row["source"] == "dlperf_v100":
        return ONEFLOW if "oneflow" in row["model"] else MEGATRON_2021
    notes = row["notes"].lower()
    if "compile" not in notes:
        return EAGER
    return COMPILED_ASYNC_TENSOR if "async tp" in notes or "asynctp" in notes else COMPILED


def _policy(row: dict[str, str]) -> str:
    """torchtitan's "selective": every second layer in its first releases, every second product since."""
    if row["source"] != "torchtitan" or row["recompute"] != "selective":
        return row["recompute"]
    return "every second layer" if "selective layer" in row["notes"] else "every second product"


def _cluster(row: dict[str, str]) -> Cluster:
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    per_node = min(gpus, NVLINK_DOMAIN if row["gpu"].startswith("GB") else per_node)
    cluster = Cluster.parse(f"{gpus // per_node}x{per_node}x{row['gpu']}")
    if row["inter_gbps_per_gpu"]:
        inter = dataclasses.replace(cluster.inter, bytes_per_s=float(row["inter_gbps_per_gpu"]) * 1e9 / 8)
        cluster = dataclasses.replace(cluster, inter=inter)
    return cluster


def predict_step_s(run: Run) -> float:
    """Seconds of one optimizer step."""
    return run.software.step_s + _pipeline_s(run)


def _pipeline_s(run: Run) -> float:
    stages = split_stages(run)
    times = [_stage_time(run, kinds) for kinds in stages]
    pipeline = run.strategy.pipeline
    width = run.strategy.data * run.strategy.tensor
    # Megatron sends each tensor rank's part and gathers it over NVLink (Narayanan et al. 2021, section 4.1).
    parts = run.shape.spread if run.source in WHOLE_SENDS else run.strategy.tensor
    row = 2.0 * run.strategy.micro_batch_size * run.shape.seq * run.shape.hidden / parts
    sends = [boundary_send_s(run.cluster, row, stage=s, distance=width) for s in range(pipeline - 1)]
    sent = held_by_send(run.cluster, run.virtual * max(sends, default=0.0), distance=width)
    shares = [_data_time(run, kinds, time, sent) for kinds, time in zip(stages, times, strict=True)]
    tails = [share.step_s + _optimizer_s(run, kinds) for share, kinds in zip(shares, stages, strict=True)]
    if run.virtual > 1:
        return _interleaved_s(run, times, sends) + max(tails)
    added = [_accumulation_s(run, kinds) for kinds in stages]
    forward = [t.forward_s + s.forward_s for t, s in zip(times, shares, strict=True)]
    backward = [t.backward_s + s.backward_s + a for t, s, a in zip(times, shares, added, strict=True)]
    # Once full, a pipeline is periodic: each further micro-batch costs the slowest stage's time.
    micro_batches = min(run.strategy.micro_batches, 3 * pipeline)
    timeline = simulate(
        schedules.all_actions("1f1b", stages=pipeline, micro_batches=micro_batches),
        forward_s=forward,
        backward_s=backward,
        send_s=sends,
        tail_s=tails,
    )
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    return timeline.step_s + (run.strategy.micro_batches - micro_batches) * slowest


def _interleaved_s(run: Run, times: list[OperatorTime], sends: list[float]) -> float:
    """Narayanan et al. 2021, section 2.2: v chunks a stage divide the bubble by v and multiply the sends; one send
    each way of each chunk can't hide behind the chunk before it, except where software of 2024 overlaps them."""
    totals = [t.total_s for t in times]
    m, v = run.strategy.micro_batches, run.virtual
    exposed = 0.0 if run.software.data_overlap else 2 * max(sends, default=0.0) * m * v
    return m * max(totals) + (sum(totals) - max(totals)) / v + exposed


def split_stages(run: Run) -> list[list[LayerKind]]:
    """The layers of each stage: blocks as even as they go, the embedding first and the head last."""
    pipeline, layers = run.strategy.pipeline, run.shape.layers
    middle = mixture_block(run.shape, run.mixture) if run.mixture else block(run.shape)
    # What does not divide is left to the middle stages: embedding and head weigh on the outer ones.
    counts = [layers // pipeline] * pipeline
    for extra in range(layers % pipeline):
        counts[(extra + 1) % pipeline] += 1
    stages = [[middle] * n for n in counts]
    stages[0].insert(0, embedding(run.shape))
    stages[-1].append(head(run.shape))
    return stages


def _stage_time(run: Run, kinds: list[LayerKind]) -> OperatorTime:
    samples = run.strategy.micro_batch_size
    device = run.cluster.device
    total = OperatorTime()
    priced: dict[int, OperatorTime] = {}
    for kind in kinds:
        if id(kind) not in priced:
            compute = layer_time(kind, device, micro_batch=samples, software=run.software)
            tensor = tensor_time(
                kind, run.cluster, degree=run.strategy.tensor, micro_batch=samples, software=run.software
            )
            policy = run.recompute if kind.collectives or len(kind.operators) > 5 else "none"
            again = _again_s(run, kind, policy)
            again += tensor.forward_s if policy == "full" else 0.0
            priced[id(kind)] = compute + tensor + _routing_time(run, kind) + OperatorTime(backward_s=again)
        total += priced[id(kind)]
    return total


def _routing_time(run: Run, kind: LayerKind) -> OperatorTime:
    """Dispatch and combine of a layer with experts, and their mirrors in the backward."""
    if run.mixture is None or len(kind.operators) <= 5:
        return OperatorTime()
    group = Group(size=run.mixture.parallel, stride=1)
    row_bytes = kind.input_bytes * run.strategy.micro_batch_size
    seconds = 2 * dispatch_s(run.cluster, group, row_bytes, topk=run.mixture.topk)
    seconds *= 1 - (run.software.expert_overlap if run.virtual > 1 else 0.0)
    seconds += routing_s(
        run.mixture.topk * row_bytes, run.cluster.device, local_experts=run.mixture.local, software=run.software
    )
    return OperatorTime(forward_s=seconds, backward_s=seconds)


def _again_s(run: Run, kind: LayerKind, policy: str) -> float:
    """Seconds of recompute in one backward of a layer."""
    device, samples = run.cluster.device, run.strategy.micro_batch_size
    if not policy.startswith("every second"):
        return recompute_s(kind, device, micro_batch=samples, policy=policy, software=run.software)
    if policy == "every second layer":
        return recompute_s(kind, device, micro_batch=samples, policy="full", software=run.software) / 2
    seconds = 0.0
    for op in kind.operators:
        share = {"gemm": 0.5, "attention": 0.0}.get(op.kind, 1.0)
        seconds += share * operator_time(op, device, micro_batch=samples, software=run.software).forward_s
    return seconds


def _data_time(run: Run, kinds: list[LayerKind], time: OperatorTime, sent: Held) -> DataParallelTime:
    """Experts are replicated over the ranks that share no expert axis, which lies over tensor and data. Their gradients
    find the links taken by the others' too."""
    routed: float = sum(p.elements for kind in kinds for p in kind.parameters if p.role == "experts")
    strategy, taken = run.strategy, _held(run, kinds, sent)
    elements = count_elements(kinds).total - routed
    whole = _synchronisation(run, kinds, time, elements=elements, strategy=strategy, taken=taken)
    if not routed:
        return whole
    spread = run.mixture.parallel if run.mixture else 1
    copies = strategy.data * strategy.tensor // spread
    apart = dataclasses.replace(strategy, data=copies, tensor=spread)
    sent_bytes = (strategy.data - 1) / strategy.data * run.gradient_bytes * elements
    beside = held_by_ring(run.cluster, Group(size=strategy.data, stride=strategy.tensor), sent_bytes)
    taken = (taken[0], taken[1] + beside)
    experts = _synchronisation(run, kinds, time, elements=routed, strategy=apart, taken=taken)
    return DataParallelTime(
        forward_s=whole.forward_s + experts.forward_s,
        backward_s=whole.backward_s + experts.backward_s,
        step_s=whole.step_s + experts.step_s,
    )


def _held(run: Run, kinds: list[LayerKind], sent: Held) -> tuple[Held, Held]:
    """What the other axes hold of the links in a forward and in a backward, hidden behind products or not."""
    cluster, strategy, samples = run.cluster, run.strategy, run.strategy.micro_batch_size
    forward = backward = sent
    priced: dict[int, tuple[Held, Held]] = {}
    for kind in kinds:
        if id(kind) not in priced:
            ahead, back = held_by_layer(kind, cluster, degree=strategy.tensor, micro_batch=samples)
            if run.recompute == "full":
                back += ahead
            if run.mixture is not None and len(kind.operators) > 5:
                group, row_bytes = Group(size=run.mixture.parallel, stride=1), kind.input_bytes * samples
                once = held_by_dispatch(cluster, group, row_bytes, topk=run.mixture.topk)
                ahead, back = ahead + once + once, back + once + once
            priced[id(kind)] = ahead, back
        ahead, back = priced[id(kind)]
        forward, backward = forward + ahead, backward + back
    return forward, backward


def _synchronisation(
    run: Run,
    kinds: list[LayerKind],
    time: OperatorTime,
    *,
    elements: float,
    strategy: Strategy,
    taken: tuple[Held, Held],
) -> DataParallelTime:
    return data_parallel_time(
        run.cluster,
        strategy=strategy,
        weight_bytes=2.0 * elements,
        gradient_bytes=run.gradient_bytes * elements,
        layers=len(kinds),
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        forward_held=taken[0],
        backward_held=taken[1],
        software=run.software,
    )


def _accumulation_s(run: Run, kinds: list[LayerKind]) -> float:
    """Seconds a micro-batch."""
    if run.strategy.micro_batches == 1 or not run.software.accumulation:
        return 0.0
    elements = count_elements(kinds).total / (run.strategy.data if run.strategy.zero_stage >= 2 else 1)
    once = gradient_accumulation_s(elements, run.cluster.device, bytes_per_element=run.gradient_bytes)
    return run.software.accumulation * once


def _optimizer_s(run: Run, kinds: list[LayerKind]) -> float:
    elements = count_elements(kinds).total / (run.strategy.data if run.strategy.zero_stage else 1)
    step = optimizer_step_s(elements, run.cluster.device, bytes_per_element=recipe("bf16").step_bytes)
    if run.strategy.pipeline == 1 or run.shape.family == "llama":
        return step
    # The tied embedding's gradient is summed between the first and the last stage.
    table = 2.0 * run.shape.vocab * run.shape.hidden / run.strategy.tensor
    distance = (run.strategy.pipeline - 1) * run.strategy.data * run.strategy.tensor
    return step + all_reduce_s(run.cluster, Group(size=2, stride=distance), table)

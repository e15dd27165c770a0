"""A plan written by hand, and the command line as a function."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from autoplan.cli.application import application
from autoplan.plan import (
    Alternative,
    Axis,
    Certificate,
    ClusterSummary,
    ModelSummary,
    Plan,
    Predicted,
    Stage,
    Strategy,
)
from tests.support.cli import Invoke


@pytest.fixture
def invoke() -> Invoke:
    """``invoke("models", "--json")`` runs a command in this process, off any terminal."""
    return lambda *arguments: CliRunner().invoke(application, list(arguments))


@pytest.fixture
def plan() -> Plan:
    """Two stages of two data ranks on a node of eight, four of them unused."""
    stages = tuple(
        Stage(
            first_layer=first,
            last_layer=last,
            recompute={"none": last - first + 1, "selective": 0},
            peak_memory_bytes=6 * 2.0**30,
            memory_terms={"weights": 2 * 2.0**30, "optimizer state": 4 * 2.0**30},
            forward_s=0.010,
            backward_s=0.020,
            parameters=62_000_000,
        )
        for first, last in ((0, 6), (7, 13))
    )
    strategy = Strategy(data=2, pipeline=2, micro_batch_size=1, micro_batches=8)
    return Plan(
        first_revision=1,  # the stages do not make the step: what files of today are asked
        gpus=8,
        gpus_used=4,
        global_batch=16,
        precision="bf16",
        optimizer="adamw",
        model=ModelSummary(
            name="gpt2",
            parameters=124_439_808,
            trainable_parameters=124_439_808,
            tokens_per_sample=1024,
            dtype="bf16",
            layers=tuple(f"layer {index}" for index in range(14)),
            fingerprint="0" * 16,
        ),
        cluster=ClusterSummary(
            spec="8xA100-80GB-SXM", device="A100-80GB-SXM", nodes=1, gpus_per_node=8, memory_bytes=80 * 2.0**30
        ),
        strategy=strategy,
        stages=stages,
        predicted=Predicted(
            step_time_s=0.312,
            tokens_per_s=16 * 1024 / 0.312,
            model_tflops_per_gpu=41.0,
            mfu=0.131,
            peak_memory_bytes=6 * 2.0**30,
            bubble_fraction=0.111,
            exposed_communication_s=0.012,
            time_terms={"compute": 0.270, "pipeline_bubble": 0.030, "data_communication": 0.012, "tensor": 0.0},
        ),
        certificate=Certificate(
            status="optimal",
            lower_bound_s=0.312,
            gap=0.0,
            considered=212,
            pruned_by_memory=10,
            pruned_by_bound=188,
            solved=14,
            solver="HiGHS",
        ),
        case="Fits one GPU; the batch is split.",
        axes=(
            Axis(
                name="pipeline",
                degree=2,
                splits="layers",
                collective="send and receive",
                times_per_step=8,
                bytes_per_step=12e6,
                exposed_s=0.0,
                link="NVLink",
            ),
            Axis(
                name="data",
                degree=2,
                splits="the batch",
                collective="all-reduce of gradients",
                times_per_step=1,
                bytes_per_step=248e6,
                exposed_s=0.012,
                link="NVLink",
            ),
        ),
        alternatives=(
            Alternative(
                family="data",
                strategy=Strategy(data=4),
                step_time_s=0.330,
                peak_memory_bytes=7 * 2.0**30,
                short_by_bytes=0.0,
                why_not="6 % slower",
            ),
        ),
        assumptions=("sequence length 1024 (none was given)",),
        seconds={"capture": 0.7, "search": 0.05},
    )

"""Predicted against published peak memory, and Korthikanti et al. 2022's analytic tables."""

from __future__ import annotations

import statistics
import tomllib
from collections import defaultdict

import pytest

from autoplan.cost_models.memory import layer_saved_bytes, micro_batches_in_flight
from autoplan.cost_models.recipes import recipe
from autoplan.plan import Strategy
from tests.regression.peaks import predict_memory, predict_peak_bytes
from tests.regression.runs import DATA, Run, read_out_of_memory, read_rows, read_runs
from tests.regression.transformer import Shape, block

# mode -> (sequence parallel, recompute)
MODES = {
    "none": (False, "none"),
    "seq only": (True, "none"),
    "selective only": (False, "selective"),
    "seq+selective": (True, "selective"),
    "full": (False, "full"),
}
ANALYTIC = read_rows("analytic_memory")
GIB = 2**30


def shape_of(row: dict[str, str], *, sequence_parallel: bool) -> Shape:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    return Shape(
        layers=int(row["layers"]),
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocab=51200,
        seq=int(row["seq"]),
        tensor=int(row["tp"]),
        sequence_parallel=sequence_parallel,
        dtype="fp16",
    )


def first_stage_bytes(row: dict[str, str], mode: str) -> float:
    """Section 4.3: the first stage holds p micro-batches of its L/p layers, interleaving adds (p - 1) / (p v)."""
    sequence_parallel, policy = MODES[mode]
    shape = shape_of(row, sequence_parallel=sequence_parallel)
    stages = int(row["pp"])
    strategy = Strategy(pipeline=stages, virtual_stages=int(row["vpp"]), micro_batches=100)
    held = micro_batches_in_flight(strategy, 0, layers=shape.layers // stages)
    return layer_saved_bytes(block(shape), policy=policy, samples=int(row["micro_batch"])) * sum(held)


@pytest.mark.parametrize("row", ANALYTIC, ids=lambda row: f"{row['model']} {row['mode']}")
def test_activations_of_the_first_stage(row: dict[str, str]) -> None:
    mode = row["mode"].split(" (")[0]
    predicted = first_stage_bytes(row, mode)
    if row["activations_gib"]:
        assert predicted / GIB == pytest.approx(float(row["activations_gib"]), rel=0.03)
    share = predicted / first_stage_bytes(row, "none")
    assert 100 * share == pytest.approx(float(row["activation_pct_of_tp_baseline"]), rel=0.03)


@pytest.mark.parametrize(
    "row", [r for r in ANALYTIC if r["params_grads_optimizer_gib"]], ids=lambda row: f"{row['model']} {row['mode']}"
)
def test_states_of_the_first_stage(row: dict[str, str]) -> None:
    """18 bytes a parameter of the layers alone."""
    kind = block(shape_of(row, sequence_parallel=False))
    layers = int(row["layers"]) / int(row["pp"])
    predicted = kind.parameter_elements * layers * recipe("fp16-megatron").total
    assert predicted / GIB == pytest.approx(float(row["params_grads_optimizer_gib"]), rel=0.03)


def test_peaks_by_source(capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for run in read_runs():
        if run.peak_memory_gb is not None and run.source in ("torchtitan", "bloom_grid"):
            predicted = predict_peak_bytes(run) / 1e9
            errors[run.source].append((predicted / run.peak_memory_gb - 1, run.id))
    lines = []
    for source, pairs in errors.items():
        sizes = [abs(error) for error, _ in pairs]
        bias = statistics.mean(error for error, _ in pairs)
        worst, name = max(pairs, key=lambda pair: abs(pair[0]))
        lines.append(
            f"{source:<24}{len(pairs):>5}{statistics.median(sizes):>9.1%}{statistics.mean(sizes):>8.1%}{bias:>+8.1%}"
            f"  {name} {worst:+.0%}"
        )
    with capsys.disabled():
        print(f"\n\npeak memory{'rows':>18}   median    mean    bias  worst row\n" + "\n".join(lines))
    ceilings = tomllib.loads((DATA / "ceilings.toml").read_text())["peak_memory"]
    assert set(ceilings) == set(errors)
    for source, pairs in errors.items():
        assert statistics.mean(abs(error) for error, _ in pairs) <= ceilings[source]["mean"], source


# The row contradicts its neighbour: 94 layers of 13312 on the same degrees and micro-batch hold as many parameters on
# every stage (4.55e9 against 4.60e9, the embeddings balanced as layers: 8 and 7 a stage), heads of the same number and
# so the same scores, as many activations, and took 67 GB. Tried: which stage is read (first and last node only), the
# flattening of the weights at the start, fp32 gradients beside 16-bit ones, the largest matrix's temporaries (822
# against 709 MB in fp32): none of them differs by the 13 GB that lie between the two. Nor is it a reserve that planners
# could keep for fragmentation: predicted are 64.9 GB, so it would have to be 19% of the card, which refuses 19 of the
# 127 rows that ran (5 without any reserve), and 15% calls 6 of 25 fit cases wrongly; the other five rows need none.
UNEXPLAINED = {"bloom_grid-128"}


@pytest.mark.parametrize("run", read_out_of_memory(), ids=lambda run: run.id)
def test_what_ran_out_of_memory_is_called(run: Run, request: pytest.FixtureRequest) -> None:
    if run.id in UNEXPLAINED:
        request.applymarker(pytest.mark.xfail(strict=True, reason="predicted to fit"))
    assert sum(predict_memory(run).values()) > 80e9  # as the source counts

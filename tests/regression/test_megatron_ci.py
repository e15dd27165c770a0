"""The allocator's readings of Megatron's own tests, between steps and at the peak."""

from __future__ import annotations

import statistics
import tomllib
from collections import Counter, defaultdict

import pytest

from tests.regression.megatron_ci import Reading, predict, read_readings
from tests.regression.runs import DATA

KEPT, DROPPED = read_readings()
CEILINGS = tomllib.loads((DATA / "ceilings.toml").read_text())["megatron_ci"]


def test_every_reading_is_used_or_left_out_for_a_reason() -> None:
    assert all(DROPPED.values())
    assert len(KEPT) >= 165


def test_allocator_readings(capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for reading in KEPT:
        group = "experts" if reading.row["num-experts"] else "dense"
        allocated, peak = predict(reading)
        errors[f"{group}_allocated"].append((allocated / reading.allocated - 1, reading.name))
        errors[f"{group}_peak"].append((peak / reading.peak - 1, reading.name))
    lines = [f"\n\n{'megatron CI':<20}{'rows':>5}{'median':>9}{'mean':>8}{'within 5%':>11}  worst row"]
    means, beyond = {}, {}
    for what, pairs in errors.items():
        sizes = [abs(error) for error, _ in pairs]
        means[what] = statistics.mean(sizes)
        beyond[what] = sum(size > 0.05 for size in sizes) / len(sizes)
        worst, name = max(pairs, key=lambda pair: abs(pair[0]))
        lines.append(
            f"{what:<20}{len(sizes):>5}{statistics.median(sizes):>9.1%}{means[what]:>8.1%}{1 - beyond[what]:>11.0%}"
            f"  {name} {worst:+.0%}"
        )
    lines += [f"left out {count}: {reason}" for reason, count in Counter(DROPPED.values()).items()]
    with capsys.disabled():
        print("\n".join(lines))
    assert set(means) == set(CEILINGS)
    for what, mean in means.items():
        assert mean <= CEILINGS[what]["mean"], what
        assert beyond[what] <= CEILINGS[what]["beyond"], what


@pytest.mark.parametrize(
    "reading",
    [r for r in KEPT if "memory_speed" in r.row["test"] or "_te_tp1_pp1_dist_optimizer" in r.row["test"]],
    ids=lambda reading: reading.name,
)
def test_peaks_of_real_size_and_of_one_stage(reading: Reading) -> None:
    assert predict(reading)[1] == pytest.approx(reading.peak, rel=0.01)

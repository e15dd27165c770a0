"""What a user with a new model and machine gets: errors on the source that the fit has not seen."""

from __future__ import annotations

import statistics
import tomllib

import pytest

from tests.regression.fit import errors_on_grid, held_out, report
from tests.regression.runs import DATA, read_runs


@pytest.mark.wide
def test_errors_on_a_source_left_out_of_the_fit(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(run, errors_on_grid(run)) for run in read_runs()]
    with capsys.disabled():
        print(f"\n\nstep time, one source left out of the fit\n{report(rows)}")
    ceilings = tomllib.loads((DATA / "ceilings.toml").read_text())["held_out"]
    sources = {run.source for run, _ in rows}
    assert set(ceilings) == sources | {"all"}
    everything: list[float] = []
    for source in sources:
        sizes = [abs(error) for error in held_out(rows, source)]
        everything += sizes
        assert statistics.mean(sizes) <= ceilings[source], source
    assert statistics.mean(everything) <= ceilings["all"]

"""Measure this machine: seconds of operators and of transfers between processes, as samples for
:mod:`autoplan.cost_models.calibration`, and the cluster file that holds the fit.

Ranks measure all at once and in step, so that what they share (memory channels, last-level cache, power) is shared as
in training. ``probes`` says what is run, ``measure`` times it, ``cluster_file`` writes what came out.
"""

from autoplan.calibration.cluster_file import cluster_toml, write_cluster
from autoplan.calibration.measure import calibrate, default_ranks

__all__ = ["calibrate", "cluster_toml", "default_ranks", "write_cluster"]

"""The fit behind ``autoplan calibrate``: measured seconds in, a device and its link out. Numbers only.

Every sample is predicted by the very functions that price plans, so that what is fitted is what will be used. The
parameters are the few that a device file has, each with a physical meaning:

    peak (the best product rate that was seen) x gemm, attention forward and attention backward efficiency,
    bandwidth (the best that was seen) x memory efficiency, seconds to launch an operator,
    and of the link alpha (seconds a message) and beta (bytes a second)

Robust least squares on their logarithms: minimise the sum of huber(log(predicted / measured)), by Gauss-Newton steps
with Huber's weights (Huber 1981, section 7.8). Relative errors, so that a microsecond counts as much as a
millisecond; Huber, so that a sample that another program disturbed pulls no harder than one that is ten percent off.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autoplan.cluster import Cluster, Device, Link
from autoplan.cost_models import communication, compute
from autoplan.cost_models.precision import short_dtype

if TYPE_CHECKING:
    from autoplan.layers.types import Operator

HUBER = 0.1  # relative error from which a sample's pull no longer grows
_STEPS = 60
_LONGEST_STEP = 0.7  # of a logarithm: no parameter changes by more than a factor of two at once
_DEVICE_PARAMETERS = (
    "gemm_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
    "launch_s",
)
_LINK_PARAMETERS = ("latency_s", "bytes_per_s")
# A logarithm has no end: where the samples (on a busy machine) want less than nothing, a figure stops here.
_LEAST = {"launch_s": 1e-9, "latency_s": 1e-9, "bytes_per_s": 1e4}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """``seconds`` that one forward (or backward) of ``operator`` took for one sample, its launch included.

    ``family``: gemm, attention, memory or dispatch.
    """

    family: str
    operator: Operator
    backward: bool
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.operator.name}, {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """``seconds`` of one ``collective`` (all_reduce, all_gather, reduce_scatter or send) of ``bytes`` (the full
    tensor) among ``ranks`` ranks of one node."""

    collective: str
    ranks: int
    bytes: float
    seconds: float

    family = "transfer"

    @property
    def name(self) -> str:
        return f"{self.collective} of {self.bytes:,.0f} bytes over {self.ranks}"


Sample = OperatorSample | TransferSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A sample beside its prediction; ``error``: predicted over measured, less one."""

    family: str
    name: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """As a share of the measured time."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The machine that the samples describe, and how well. ``dtypes``: those that products were measured in."""

    cluster: Cluster
    residuals: tuple[Residual, ...]
    dtypes: tuple[str, ...] = ()

    def errors(self, family: str | None = None) -> tuple[float, float]:
        """(median, worst) absolute relative error of a family, or of all samples."""
        errors = [abs(r.error) for r in self.residuals if family in (None, r.family)]
        return statistics.median(errors), max(errors)

    @property
    def families(self) -> tuple[str, ...]:
        """The families measured, in the order of the report."""
        return tuple(dict.fromkeys(r.family for r in self.residuals))


def predicted_s(sample: Sample, cluster: Cluster) -> float:
    """Seconds that plans would be made with for ``sample`` on ``cluster``."""
    if isinstance(sample, OperatorSample):
        from autoplan.layers.types import LayerKind  # its package imports torch: here only where there are samples

        kind = LayerKind(operators=(sample.operator,), parameters=())
        times = compute.layer_time(kind, cluster.device, micro_batch=1)
        return times.backward_s if sample.backward else times.forward_s
    if sample.collective == "send":
        return communication.send_s(cluster, sample.bytes, 1, source=0)
    price = {
        "all_reduce": communication.all_reduce_s,
        "all_gather": communication.all_gather_s,
        "reduce_scatter": communication.reduce_scatter_s,
    }[sample.collective]
    return price(cluster, communication.Group(size=sample.ranks, stride=1), sample.bytes)


def fit(cluster: Cluster, samples: Sequence[Sample]) -> Fit:
    """``cluster`` with the device and intra-node link that explain ``samples`` best.

    What no sample tells of keeps its value: the link where nothing was sent, attention where none was measured. Raises
    ValueError for a time that is not positive.
    """
    if any(not sample.seconds > 0 for sample in samples):
        raise ValueError("a sample took no time")
    operators = [sample for sample in samples if isinstance(sample, OperatorSample)]
    transfers = [sample for sample in samples if isinstance(sample, TransferSample)]
    dtypes = tuple(dict.fromkeys(short_dtype(sample.operator.dtype) for sample in operators if _is_product(sample)))
    device = _at_observed_peaks(cluster.device, operators)
    fitted = dataclasses.replace(cluster, device=device)
    if operators:
        names = _told_of(operators)
        fitted = _refine(fitted, operators, names, _with_device)
        fitted = dataclasses.replace(fitted, device=_as_shares(fitted.device, names, dtypes))
    if transfers:
        fitted = _refine(fitted, transfers, _LINK_PARAMETERS, _with_link)
    residuals = tuple(
        Residual(
            family=sample.family,
            name=sample.name,
            measured_s=sample.seconds,
            predicted_s=predicted_s(sample, fitted),
        )
        for sample in samples
    )
    return Fit(cluster=fitted, residuals=residuals, dtypes=dtypes)


def _at_observed_peaks(device: Device, samples: Sequence[OperatorSample]) -> Device:
    """A CPU's file only assumes its peaks: take the best rates that were seen. A GPU keeps its data sheet's."""
    if not device.is_cpu:
        return device
    peaks = dict(device.peak_flops)
    rates = [(short_dtype(s.operator.dtype), s.operator.flops / s.seconds) for s in samples if _is_product(s)]
    for dtype in {dtype for dtype, _ in rates}:
        peaks[dtype] = max(rate for other, rate in rates if other == dtype)
    moved = [_moved_bytes(s) / s.seconds for s in samples if s.family == "memory" and not s.backward]
    bandwidth = max(moved, default=device.memory_bytes_per_s)
    return dataclasses.replace(device, peak_flops=peaks, memory_bytes_per_s=bandwidth)


def _as_shares(device: Device, fitted: Sequence[str], dtypes: Sequence[str]) -> Device:
    """The same rates with efficiencies of at most 1: what is above goes into the peaks of what was measured."""
    above, memory_above = max(1.0, device.gemm_efficiency), max(1.0, device.memory_efficiency)
    of_peak = {name: getattr(device, name) for name in fitted if name.startswith("attention")}
    return dataclasses.replace(
        device,
        peak_flops={d: peak * above if d in dtypes else peak for d, peak in device.peak_flops.items()},
        gemm_efficiency=device.gemm_efficiency / above,
        memory_bytes_per_s=device.memory_bytes_per_s * memory_above,
        memory_efficiency=device.memory_efficiency / memory_above,
        **{name: share / above for name, share in of_peak.items()},
    )


def _is_product(sample: OperatorSample) -> bool:
    return sample.family == "gemm" and not sample.backward


def _moved_bytes(sample: OperatorSample) -> float:
    op = sample.operator
    return op.read_bytes + op.written_bytes + op.parameter_bytes


def _told_of(samples: Sequence[OperatorSample]) -> tuple[str, ...]:
    """The parameters that the samples say something about."""
    families = {(sample.family, sample.backward) for sample in samples}
    kinds = {family for family, _ in families}
    needed = {
        "gemm_efficiency": "gemm" in kinds,
        "attention_forward_efficiency": ("attention", False) in families,
        "attention_backward_efficiency": ("attention", True) in families,
        "memory_efficiency": "memory" in kinds,
        "launch_s": "dispatch" in kinds,
    }
    return tuple(name for name in _DEVICE_PARAMETERS if needed[name])


def _with_device(cluster: Cluster, values: dict[str, float]) -> Cluster:
    # A CPU's peaks are only what was seen, launches included: its efficiencies may pass them (see _as_shares).
    shares = () if cluster.device.is_cpu else ("gemm_efficiency", "memory_efficiency")
    shares = (*shares, "attention_forward_efficiency", "attention_backward_efficiency")
    limited = {name: min(v, 1.0) if name in shares else max(v, _LEAST.get(name, 0.0)) for name, v in values.items()}
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, **limited))  # type: ignore[arg-type]


def _with_link(cluster: Cluster, values: dict[str, float]) -> Cluster:
    limited = {name: max(v, _LEAST[name]) for name, v in values.items()}
    return dataclasses.replace(cluster, intra=dataclasses.replace(cluster.intra, **limited))  # type: ignore[arg-type]


def _refine(
    cluster: Cluster,
    samples: Sequence[Sample],
    names: Sequence[str],
    put: Callable[[Cluster, dict[str, float]], Cluster],
) -> Cluster:
    """Gauss-Newton on the logarithms of ``names``, weighted as Huber's loss says; steps that do not help are halved."""
    source: Device | Link = cluster.device if put is _with_device else cluster.intra
    at = np.log([getattr(source, name) for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        machine = put(cluster, dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.array([math.log(predicted_s(s, machine) / s.seconds) for s in samples])

    found = residuals(at)
    for _ in range(_STEPS):
        step = _step(residuals, at, found)
        for halvings in range(12):
            tried = at + step / 2**halvings
            after = residuals(tried)
            if _huber(after) < _huber(found):
                break
        else:
            break
        improved = _huber(found) - _huber(after)
        at, found = tried, after
        if improved < 1e-9 * max(_huber(found), 1e-9):
            break
    return put(cluster, dict(zip(names, np.exp(at).tolist(), strict=True)))


def _step(residuals: Callable[[np.ndarray], np.ndarray], at: np.ndarray, found: np.ndarray) -> np.ndarray:
    width = 1e-4
    columns = [(residuals(at + width * axis) - found) / width for axis in np.eye(len(at))]
    jacobian = np.stack(columns, axis=1)
    weight = np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(found), 1e-12)))[:, None]
    # A little damping: a parameter that no sample feels at this point (the other arm of a maximum) stays.
    normal = (jacobian * weight).T @ (jacobian * weight) + 1e-6 * np.eye(len(at))
    step = np.linalg.solve(normal, -(jacobian * weight).T @ (found * weight[:, 0]))
    return np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)


def _huber(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.sum(np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))))

"""``autoplan calibrate``: measure this machine, and write a cluster file that plans are made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import completions, console, options
from autoplan.cli.output import check_file, is_stdout, write
from autoplan.explain.text import percent, seconds

if TYPE_CHECKING:
    from autoplan.cost_models.calibration import Fit

WORST = 5  # rows of the table of what is predicted worst


def calibrate(
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda, or cpu for gloo processes.", autocompletion=completions.devices),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="Ranks that measure together: all GPUs, or a core each.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE.toml", help="Write a cluster file for --gpus; - is standard output."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, less exact.")] = False,
    json: options.Json = False,
) -> None:
    """Measure this machine's operators and links, and fit the figures that plans are made from.

    Prints measured against predicted, by family and for what is predicted worst.

    Example: autoplan calibrate --device cpu --gpus 2 --quick -o here.toml
    """
    check_file(output, what="cluster file", name="cluster.toml", json=json)
    with console.progress("Measuring"):
        from autoplan.calibration import calibrate as measure
        from autoplan.calibration import cluster_toml
        from autoplan.cluster import local_device_count

        chosen = device or ("cuda" if local_device_count() else "cpu")
        fit = measure(device=chosen, gpus=gpus, quick=quick, note=console.note)
    if output is not None:
        write(output, cluster_toml(fit), what="cluster file")
        if is_stdout(output):
            return
        named = output if output.suffix == ".toml" or output.name != str(output) else f"./{output}"
        console.note(f"written: {output}; use it as --gpus {named}")
    if json:
        console.result_json(_as_json(fit))
    else:
        console.result(_figures(fit), "", _families(fit), "", _worst(fit))


def _figures(fit: Fit) -> Any:
    device, link = fit.cluster.device, fit.cluster.intra
    listed = console.table(("parameter", False), ("value", True))
    for dtype in fit.dtypes:
        listed.add_row(f"{dtype} products", f"{device.peak_flops[dtype] * device.gemm_efficiency / 1e9:,.0f} GFLOP/s")
    listed.add_row("attention, forward", percent(device.attention_forward_efficiency) + " of the peak")
    listed.add_row("attention, backward", percent(device.attention_backward_efficiency) + " of the peak")
    listed.add_row("memory", f"{device.memory_bytes_per_s * device.memory_efficiency / 1e9:,.1f} GB/s")
    listed.add_row("launch of an operator", seconds(device.launch_s))
    if fit.cluster.gpus_per_node > 1:
        listed.add_row(f"{link.name}, bandwidth", f"{link.bytes_per_s / 1e9:,.2f} GB/s")
        listed.add_row(f"{link.name}, latency", seconds(link.latency_s))
    return listed


def _families(fit: Fit) -> Any:
    listed = console.table(("measured", False), ("samples", True), ("median error", True), ("worst error", True))
    for family in fit.families:
        median, worst = fit.errors(family)
        count = sum(residual.family == family for residual in fit.residuals)
        listed.add_row(family, str(count), percent(median), percent(worst))
    median, worst = fit.errors()
    listed.add_row("all", str(len(fit.residuals)), percent(median), percent(worst))
    return listed


def _worst(fit: Fit) -> Any:
    listed = console.table(("predicted worst", False), ("measured", True), ("predicted", True), ("error", True))
    for residual in sorted(fit.residuals, key=lambda r: -abs(r.error))[:WORST]:
        listed.add_row(
            residual.name, seconds(residual.measured_s), seconds(residual.predicted_s), f"{residual.error:+.0%}"
        )
    return listed


def _as_json(fit: Fit) -> dict[str, Any]:
    device, link = fit.cluster.device, fit.cluster.intra
    return {
        "schema": 1,
        "device": {
            "name": device.name,
            "peak_flops": device.peak_flops,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "launch_s": device.launch_s,
            "gemm_efficiency": device.gemm_efficiency,
            "attention_forward_efficiency": device.attention_forward_efficiency,
            "attention_backward_efficiency": device.attention_backward_efficiency,
            "memory_efficiency": device.memory_efficiency,
        },
        "intra": {"name": link.name, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s},
        "gpus": fit.cluster.gpus,
        "errors": {family: dict(zip(("median", "worst"), fit.errors(family), strict=True)) for family in fit.families},
        "measurements": [
            {
                "family": r.family,
                "name": r.name,
                "measured_s": r.measured_s,
                "predicted_s": r.predicted_s,
                "error": r.error,
            }
            for r in fit.residuals
        ],
    }

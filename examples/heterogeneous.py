"""A cluster of two kinds of GPUs, from a file: which stage stands on which kind, and what the older one is good for.

python examples/heterogeneous.py
"""

from __future__ import annotations

from pathlib import Path

from own_model import build

import autoplan

CLUSTER = Path(__file__).parent / "two_kinds.toml"


def main() -> None:
    model, inputs, loss_fn = build()
    both = autoplan.plan(model, gpus=CLUSTER, example_inputs=inputs, loss_fn=loss_fn, global_batch=65536)
    print(both.case)
    for number, stage in enumerate(both.stages):
        layers = f"layers {stage.first_layer} to {stage.last_layer}"
        print(f"  stage {number} on {stage.device or both.cluster.device}: {layers}, {stage.parameters:,} parameters")
    new = autoplan.plan(model, gpus="2x8xH100", example_inputs=inputs, loss_fn=loss_fn, global_batch=65536)
    gain = new.predicted.step_time_s / both.predicted.step_time_s - 1
    steps = (both.predicted.step_time_s, new.predicted.step_time_s)
    print(f"{steps[0]:.2f} s a step; the new nodes alone {steps[1]:.2f} s ({gain:+.0%})")


if __name__ == "__main__":
    main()

"""Your own ideas against the planner's: force parts of the answer, bound others, and see what each costs.

python examples/forced_strategies.py
"""

from __future__ import annotations

from own_model import build

import autoplan

ASKED = {
    "the planner's own": None,
    "data parallel only": {"tensor": 1, "pipeline": 1},
    "tensor over the node": {"tensor": 8},
    "a pipeline, at most 4 deep": {"pipeline": "2|4", "tensor": 1},
    "everything sharded": {"data": 8, "zero_stage": 3},
    "recompute all": {"recompute": "full"},
    "20% of memory free": {"memory_headroom": "20%"},
}


def main() -> None:
    model, inputs, loss_fn = build()
    print(f"{'asked for':<28} {'plan':<34} {'step':>9} {'memory':>10}")
    for name, strategy in ASKED.items():
        try:
            plan = autoplan.plan(
                model,
                gpus="8xA100-80GB",
                example_inputs=inputs,
                loss_fn=loss_fn,
                global_batch=512,
                strategy=strategy,
            )
        except autoplan.InfeasibleError as error:  # the answer is no, and says by how much
            print(f"{name:<28} does not fit: {error.short_by_bytes / 2**30:.1f} GiB short")
            continue
        predicted = plan.predicted
        print(
            f"{name:<28} {plan.strategy.describe():<34} {predicted.step_time_s * 1e3:6.1f} ms "
            f"{predicted.peak_memory_bytes / 2**30:6.1f} GiB"
        )


if __name__ == "__main__":
    main()

"""autoplan: automatic parallelism planner and compiler for PyTorch.

    program = autoplan.compile(model, gpus=8, example_inputs=batch)

Vocabulary: an *axis* is of the mesh (data, tensor, pipeline), a *dimension* of a tensor, a *stage* of the pipeline, a
*layer* of the model; a *micro-batch* is what one stage computes at once; a *placement* says how a tensor lies over an
axis. torch is imported only when something needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import autoplan.plan  # noqa: F401  first, so that the function of that name below is what the package shows
from autoplan.cluster import Cluster, Device, Link
from autoplan.errors import (
    AutoplanError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    ModelError,
    PlanFileError,
    RuntimeFault,
    StrategyError,
    VerifyError,
)
from autoplan.plan import Plan, Stage, Strategy

from autoplan.api import compile, plan, predict  # isort: skip
from autoplan.questions import compare, fit, min_gpus  # isort: skip
from autoplan.verification import verify  # isort: skip

if TYPE_CHECKING:
    from autoplan.runtime.checkpoints import Checkpoints
    from autoplan.runtime.launch import launch
    from autoplan.runtime.program import Program

__version__ = "0.1.0"

__all__ = [
    "AutoplanError",
    "CaptureError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Device",
    "InfeasibleError",
    "Link",
    "ModelError",
    "Plan",
    "PlanFileError",
    "Program",
    "RuntimeFault",
    "Stage",
    "Strategy",
    "StrategyError",
    "VerifyError",
    "compare",
    "compile",
    "fit",
    "launch",
    "min_gpus",
    "plan",
    "predict",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("Checkpoints", "Program", "launch"):
        import autoplan.runtime

        return getattr(autoplan.runtime, name)
    raise AttributeError(f"module 'autoplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""autoplan: automatic parallelism planner and compiler for PyTorch.

    program = autoplan.compile(model, gpus=8, example_inputs=batch)

Vocabulary: an *axis* is of the mesh (data, tensor, pipeline), a *dimension* of a tensor, a *stage* of the pipeline, a
*layer* of the model; a *micro-batch* is what one stage computes at once; a *placement* says how a tensor lies over an
axis. torch is imported only when something needs it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.api import compile, plan, predict
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
    from autoplan.questions import compare, fit, min_gpus
    from autoplan.runtime.checkpoints import Checkpoints
    from autoplan.runtime.initialise import empty_weights
    from autoplan.runtime.launch import launch
    from autoplan.runtime.metrics import Metrics
    from autoplan.runtime.program import Program
    from autoplan.runtime.scaling import GradScaler
    from autoplan.sharding import register_rule
    from autoplan.verification import verify

__version__ = "0.1.0"

__all__ = [
    "AutoplanError",
    "CaptureError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Device",
    "GradScaler",
    "InfeasibleError",
    "Link",
    "Metrics",
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
    "empty_weights",
    "fit",
    "launch",
    "min_gpus",
    "plan",
    "predict",
    "register_rule",
    "verify",
]


# Loaded on first use: `autoplan --help` and `import autoplan` in a script's every rank start at once.
_HOMES = {
    "api": ("compile", "plan", "predict"),
    "cluster": ("Cluster", "Device", "Link"),
    "errors": tuple(name for name in __all__ if name.endswith(("Error", "Fault"))),
    "plan": ("Plan", "Stage", "Strategy"),
    "questions": ("compare", "fit", "min_gpus"),
    "runtime": ("Checkpoints", "GradScaler", "Metrics", "Program", "empty_weights", "launch"),
    "sharding": ("register_rule",),
    "verification": ("verify",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"autoplan.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """This package, whose ``plan`` is the function: importing the module of that name leaves it so."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "plan" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

"""Run a plan: stage graphs, schedules and collectives on plain ``torch.distributed``."""

from autoplan.runtime.checkpoints import Checkpoints, Resumed
from autoplan.runtime.faults import CheckpointError, RankFault
from autoplan.runtime.initialise import empty_weights
from autoplan.runtime.launch import ensure_process_group, how_to_launch, launch
from autoplan.runtime.metrics import Metrics, StepMetrics
from autoplan.runtime.program import Program
from autoplan.runtime.scaling import GradScaler

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "GradScaler",
    "Metrics",
    "Program",
    "RankFault",
    "Resumed",
    "StepMetrics",
    "empty_weights",
    "ensure_process_group",
    "how_to_launch",
    "launch",
]

"""The search: from layers, machines and a batch to the plan with the least parallelism that is as fast.

A *candidate* is a tuple of degrees with a micro-batch size; a *split* divides the layers into stages; a *span* is a run
of layers; a *policy* says what a layer recomputes. The walk: :mod:`.problem` (the question) -> :mod:`.forced` (the
user's keys) -> :mod:`.degrees` (candidates) -> :mod:`.bounds` (all of them, cheaply) -> :mod:`.engine` (best first) ->
:mod:`.tables`, :mod:`.recompute` (what a stage costs) -> :mod:`.split`, :mod:`.milp` (the stages) -> :mod:`.evaluate`
(the plan, priced again) -> :mod:`.families`, :mod:`.cases`, :mod:`.infeasible` (the reasons).
"""

from autoplan.search.planner import predict, search
from autoplan.search.problem import Problem

__all__ = ["Problem", "predict", "search"]

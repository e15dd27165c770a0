"""float32 master copies of 16-bit weights (Micikevicius et al. 2018, section 3.1), as the plan's precision says.

Under ``bf16`` and ``fp16`` the graph reads 16-bit weights and its backward adds up 16-bit gradients; the optimizer
updates float32 masters, and keeps float32 state, from gradients that are widened once a step. The next step begins by
rounding the masters into the weights. These are the 2 + 2 + 4 + 8 bytes a parameter that the planner prices
(:mod:`autoplan.cost_models.recipes`), masters and state split by ZeRO; while the optimizer runs, gradients take 4 bytes
and not 2. ``bf16-pure`` and ``fp16-pure`` keep no masters. Parameters of another dtype, and frozen ones, have none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoplan.cost_models.recipes import recipe

EXECUTED = ("fp64", "fp32", "bf16", "fp16", "bf16-pure", "fp16-pure")  # of the precisions that can be planned for
_HALF = (torch.bfloat16, torch.float16)


def keeps_masters(precision: str) -> bool:
    """Whether the plan's precision counts master weights."""
    return recipe(precision).master_weights > 0


def widened(values: Tensor, like: nn.Parameter, masters: bool) -> Tensor:
    """What the optimizer updates of ``values``, all or a slice of the parameter ``like``: a float32 copy of 16-bit
    ones that train where there are ``masters``; ``values`` themselves elsewhere."""
    return values.float() if masters and like.requires_grad and like.dtype in _HALF else values


def masters_of(parameters: Mapping[str, nn.Parameter], masters: bool) -> dict[str, nn.Parameter]:
    """float32 copies of those of ``parameters`` that have masters, by the same names."""
    wide = {name: widened(own.detach(), own, masters) for name, own in parameters.items()}
    return {name: nn.Parameter(values) for name, values in wide.items() if values.dtype != parameters[name].dtype}


@torch.no_grad()
def round_into(parameters: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]) -> None:
    """Bring the 16-bit ``parameters`` up to their ``masters``."""
    for name, master in masters.items():
        parameters[name].copy_(master)

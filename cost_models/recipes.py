"""Bytes that training keeps for one parameter, by precision and optimizer.

"Mixed precision" is Micikevicius et al. 2018 as ZeRO (Rajbhandari et al. 2020, section 3.1) counts it: 16-bit weights
and gradients, fp32 master weights, two fp32 moments: 2 + 2 + 4 + 8 = 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.cost_models.precision import short_dtype
from autoplan.errors import StrategyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Bytes a parameter. ``master_weights`` is 0 where the weights are the master copy; ``step_temporary`` is what the
    optimizer step allocates a trainable parameter while it runs."""

    name: str
    weights: float
    gradients: float
    master_weights: float
    optimizer_state: float
    step_temporary: float = 0.0

    @property
    def step_bytes(self) -> float:
        """Read and written by one optimizer step for one parameter: all states twice, the gradient once."""
        return 2 * (self.weights + self.master_weights + self.optimizer_state) + self.gradients

    @property
    def total(self) -> float:
        """Resident bytes for one trainable parameter."""
        return self.weights + self.gradients + self.master_weights + self.optimizer_state


# precision -> (weights, gradients, master weights). fp8 and fp4 train from bf16 weights with a quantised copy of each
# and its transpose, kept for the backward (Transformer Engine): 2 more bytes in fp8, 1 in fp4 with its scales.
_PRECISIONS = {
    "fp64": (8.0, 8.0, 0.0),
    "fp32": (4.0, 4.0, 0.0),
    "bf16": (2.0, 2.0, 4.0),
    "fp16": (2.0, 2.0, 4.0),
    "fp8": (4.0, 2.0, 4.0),
    "mxfp8": (4.0, 2.0, 4.0),
    "nvfp4": (3.2, 2.0, 4.0),
    "bf16-pure": (2.0, 2.0, 0.0),
    "fp16-pure": (2.0, 2.0, 0.0),
    "bf16-deepspeed": (2.0, 6.0, 4.0),
    "bf16-megatron": (2.0, 4.0, 4.0),
    "fp16-megatron": (2.0, 4.0, 4.0),
}
# optimizer -> (states a parameter, bytes of a state; 0 means the master's dtype)
_OPTIMIZERS = {
    "adamw": (2, 0.0),
    "adam": (2, 0.0),
    "adamw8bit": (2, 1.0),
    "lion": (1, 0.0),
    "momentum": (1, 0.0),
    "sgd": (0, 0.0),
    "adafactor": (0, 0.0),  # row and column means: two vectors a matrix
}


def recipe(precision: str, optimizer: str = "adamw") -> Recipe:
    """The recipe of ``precision`` with ``optimizer``; raises :class:`StrategyError` for unknown names.

    Precisions: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. ``-pure`` keeps no fp32 copy, ``-megatron`` accumulates
    gradients in fp32, ``-deepspeed`` keeps fp32 gradients beside 16-bit ones.
    """
    key, kind = short_dtype(precision.lower()), optimizer.lower()
    if key not in _PRECISIONS:
        raise StrategyError(
            f"unknown precision: {precision!r}", legal=", ".join(_PRECISIONS), attempt="--precision bf16"
        )
    if kind not in _OPTIMIZERS:
        raise StrategyError(f"unknown optimizer: {optimizer!r}", legal=", ".join(_OPTIMIZERS), attempt="adamw")
    weights, gradients, master = _PRECISIONS[key]
    states, state_bytes = _OPTIMIZERS[kind]
    full = master or weights
    return Recipe(
        name=f"{key} {kind}",
        weights=weights,
        gradients=gradients,
        master_weights=master,
        optimizer_state=states * (state_bytes or full),
        # torch's foreach Adam keeps the root of the second moment of all parameters at once; Megatron's is fused.
        step_temporary=full if kind in ("adamw", "adam") and not key.endswith("-megatron") else 0.0,
    )

"""Bytes that training keeps for one parameter, by precision and optimizer.

"Mixed precision" is Micikevicius et al. 2018 as ZeRO (Rajbhandari et al. 2020, section 3.1) counts it: 16-bit weights
and gradients, fp32 master weights, two fp32 moments: 2 + 2 + 4 + 8 = 16 bytes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from autoplan.cost_models.precision import short_dtype
from autoplan.errors import StrategyError

__all__ = ["OPTIMIZERS", "PRECISIONS", "Recipe", "recipe"]


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
        """Bytes read and written by one optimizer step for one parameter: all states twice, the gradient once."""
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
    "bf16-zero": (2.0, 2.0, 4.0),
    "fp16-zero": (2.0, 2.0, 4.0),
}
# DeepSpeed's ZeRO optimizer widens its shard of the gradients to fp32 for the step.
_WIDENED = 4.0


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """States a parameter; bytes of one (0: the master's dtype); states that a step holds once more as temporaries."""

    states: float
    state_bytes: float = 0.0
    temporary: float = 0.0


# bitsandbytes: a byte an element and a float32 scale for each block of 256 (Dettmers et al. 2022, section 2.1).
_EIGHT_BITS = 1 + 4 / 256
# Adafactor (Shazeer and Stern 2018): float32 means of rows and columns. Two vectors a matrix are 8 / 1024 bytes an
# element for a square one of 1024, and less for wider ones.
_FACTORED = 8 / 1024
# torch's foreach Adam holds the root of the second moment of all parameters at once, foreach Lion its update; fused
# kernels and those that go parameter by parameter hold next to nothing.
_OPTIMIZERS = {
    "adamw": _Optimizer(2, temporary=1),
    "adam": _Optimizer(2, temporary=1),
    "adamw-fused": _Optimizer(2),
    "adam-fused": _Optimizer(2),
    "adamw8bit": _Optimizer(2, _EIGHT_BITS),
    "adam8bit": _Optimizer(2, _EIGHT_BITS),
    "lion": _Optimizer(1, temporary=1),
    "sgd": _Optimizer(0),
    "sgd-momentum": _Optimizer(1),
    "adafactor": _Optimizer(1, _FACTORED),
}
# Other spellings: class names of torch and bitsandbytes, in lower case.
_ALIASES = {
    "momentum": "sgd-momentum",
    "adamw_8bit": "adamw8bit",
    "adam_8bit": "adam8bit",
    "fused-adamw": "adamw-fused",
}
OPTIMIZERS, PRECISIONS = tuple(_OPTIMIZERS), tuple(_PRECISIONS)


def recipe(precision: str, optimizer: str = "adamw") -> Recipe:
    """The recipe of ``precision`` with ``optimizer``; raises :class:`StrategyError` for unknown names.

    Precisions: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. ``-pure`` keeps no fp32 copy, ``-megatron`` accumulates
    gradients in fp32, ``-deepspeed`` (its bf16 optimizer) keeps fp32 gradients beside 16-bit ones, ``-zero`` (its ZeRO
    optimizer) widens them to fp32 for the step. Optimizers: :data:`OPTIMIZERS`.
    """
    key, kind = short_dtype(precision.lower()), _ALIASES.get(optimizer.lower(), optimizer.lower())
    if key not in _PRECISIONS:
        raise StrategyError(
            f"unknown precision: {precision!r}", legal=", ".join(_PRECISIONS), attempt="--precision bf16"
        )
    if kind not in _OPTIMIZERS:
        near = difflib.get_close_matches(kind, (*_OPTIMIZERS, *_ALIASES), n=1)
        raise StrategyError(
            f"unknown optimizer: {optimizer!r}",
            legal=", ".join(_OPTIMIZERS),
            attempt=f"did you mean {near[0]!r}?" if near else "the name whose states come nearest; adamw keeps two",
        )
    weights, gradients, master = _PRECISIONS[key]
    chosen = _OPTIMIZERS[kind]
    full = master or weights
    fused = key.endswith(("-megatron", "-zero"))  # their optimizers always are
    widened = _WIDENED if key.endswith("-zero") else 0.0
    return Recipe(
        name=f"{key} {kind}",
        weights=weights,
        gradients=gradients,
        master_weights=master,
        optimizer_state=chosen.states * (chosen.state_bytes or full),
        step_temporary=widened if fused else chosen.temporary * full,
    )

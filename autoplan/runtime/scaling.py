"""Gradient scaling for fp16, with torch's own scaler: one decision on every rank.

    scaler = autoplan.GradScaler(program)
    for batch in loader:
        program.step(batch)                # its backward starts from the scale
        scaler.unscale_(optimizer)         # where gradients are clipped or looked at
        program.clip_grad_norm_(1.0)
        scaler.step(optimizer)             # nothing, on all ranks, where any rank has a gradient that is not finite
        scaler.update()
        optimizer.zero_grad()

Give it to :class:`Checkpoints` as ``scaler=scaler``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autoplan.runtime.program import Program


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a program, whose steps it scales from now on; ``options`` are torch's (init_scale,
    growth_factor, backoff_factor, growth_interval, enabled). Gradients may be fp16 themselves."""

    def __init__(self, program: Program, **options: Any) -> None:
        part = program._rank_part()
        self._mesh, self._interpreter = part.mesh, part.interpreter
        super().__init__(part.mesh.device.type, **options)
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(part.mesh.device)
        self._tell()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self._tell()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.is_enabled() and self._scale is not None:
            self._scale.fill_(state_dict["scale"])
            self._growth_tracker.fill_(state_dict["_growth_tracker"])  # type: ignore[union-attr]
        self._tell()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """A collective over all ranks, those without gradients included."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
        worst = torch.stack([found_inf, *(value.to(found_inf.device) for value in found.values())]).max()
        return {found_inf.device: self._mesh.max_over_world(worst)}

    def _tell(self) -> None:
        """The scale from which the next step's backward starts."""
        if self._interpreter is not None:
            self._interpreter.loss_scale = self.get_scale()

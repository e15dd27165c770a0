"""Whole tensors under the user's names, whatever the plan: gathered, loaded, saved.

A parameter's way back: slices over the data axis (ZeRO), then shards over the tensor axis, then from its first stage to
every rank. Every method here is a collective over all ranks, in one order of names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.capture import Capture
from autoplan.plan import Coordinates
from autoplan.runtime.build import Ownership
from autoplan.runtime.collectives import AxisCommunicator, Mesh
from autoplan.runtime.data_parallel import GradientSync
from autoplan.runtime.faults import CheckpointError
from autoplan.sharding.placements import REPLICATE, Placement, Shard, assemble, take_shard

WEIGHTS = "model.safetensors"


class FullTensors:
    """Gathers and loads the whole tensors of a program. ``sync`` is None on a rank beyond the plan's GPUs."""

    def __init__(
        self,
        capture: Capture,
        ownership: Ownership,
        mesh: Mesh,
        *,
        sync: GradientSync | None,
        placements: Mapping[str, Placement],
        buffers: Mapping[str, Tensor],
        buffer_owner: Mapping[str, int],
    ) -> None:
        self._capture, self._ownership, self._mesh = capture, ownership, mesh
        self._sync, self._placements = sync, placements
        self._buffers, self._buffer_owner = buffers, buffer_owner

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer, whole, on every rank; tied names share one tensor."""
        whole = {name: self._gather(name, lambda sync, n: sync.whole(n)) for name in self._ownership.holders}
        state: dict[str, Tensor] = {}
        for name, value in self._capture.graph_module.state_dict().items():
            if name in self._ownership.canonical:
                state[name] = whole[self._ownership.canonical[name]]
            else:
                state[name] = self._buffer(name, value)
        return state

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the parameters that have one, by the first of each one's names, on every rank."""
        names = list(self._ownership.holders)
        exist = torch.zeros(max(1, len(names)), device=self._mesh.device)
        for index, name in enumerate(names):
            held = self._sync.parameters.get(name) if self._sync is not None else None
            exist[index] = float(held is not None and held.grad is not None)
        self._mesh.max_over_world(exist)
        return {
            name: self._gather(name, lambda sync, n: sync.whole_gradient(n))
            for name, found in zip(names, exist.tolist(), strict=False)
            if found
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take each rank's part of whole tensors. Raises CheckpointError naming what does not fit."""
        expected = self._capture.graph_module.state_dict()
        _check_names(state, expected, self._ownership)
        for name, value in expected.items():
            values = state.get(name)
            if values is None:
                continue
            _check_shape(name, values, value)
            if name in self._ownership.canonical:
                self._load_parameter(self._ownership.canonical[name], values)
            elif name in self._buffers:
                self._buffers[name].copy_(values)

    def save(self, directory: Path) -> None:
        """Write ``model.safetensors`` beside ``directory`` and rename; rank 0 writes, all wait for it."""
        state = self.state_dict()
        problem = ""
        if self._mesh.rank == 0:
            try:
                _write(directory, state)
            except OSError as error:
                problem = f"{error.strerror or error}: {error.filename or directory}"
        self._raise_together(f"cannot write the checkpoint: {problem}" if problem else "", directory)

    def load(self, directory: Path) -> None:
        """Read what :meth:`save` wrote, under this or any other plan."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = directory / WEIGHTS
        if not path.exists() and (kept := _previous(directory) / WEIGHTS).exists():
            path = kept  # the writer died between its two renames
        problem, state = "", {}
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            problem = f"{path} cannot be read as a checkpoint: {error}"
        self._raise_together(problem, directory)
        self.load_state_dict(state)

    # ---------------------------------------------------------------------------------------------------------- details

    def _gather(self, name: str, read: Callable[[GradientSync, str], Tensor]) -> Tensor:
        """One parameter, or its gradient, whole on every rank."""
        mesh, strategy = self._mesh, self._mesh.strategy
        owner = self._ownership.holders[name][0]
        whole: Tensor | None = None
        if self._sync is not None and mesh.at is not None and mesh.at.pipeline == owner:
            local = read(self._sync, name).contiguous()
            placement = self._placements.get(name)
            whole = local
            if isinstance(placement, Shard):
                whole = assemble(AxisCommunicator(mesh).all_gather(local, "tensor"), placement)
        if whole is None:
            pattern = self._capture.graph_module.get_parameter(name)
            whole = torch.empty(pattern.shape, dtype=pattern.dtype, device=mesh.device)
        whole = whole.detach().clone(memory_format=torch.contiguous_format)
        return mesh.broadcast(whole, source=strategy.rank(Coordinates(owner, 0, 0)))

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        """A buffer that the forward writes comes from the stage that does; others are alike everywhere."""
        mesh = self._mesh
        current = self._buffers.get(name, value.to(mesh.device)).detach().clone(memory_format=torch.contiguous_format)
        if name not in self._buffer_owner:
            return current
        return mesh.broadcast(current, source=mesh.strategy.rank(Coordinates(self._buffer_owner[name], 0, 0)))

    @torch.no_grad()
    def _load_parameter(self, name: str, values: Tensor) -> None:
        mesh = self._mesh
        if self._sync is None or mesh.at is None or name not in self._sync.working:
            return
        placement = self._placements.get(name, REPLICATE)
        local = take_shard(values, placement, index=mesh.at.tensor, degree=mesh.strategy.tensor)
        self._sync.load(name, local.to(device=mesh.device, dtype=self._sync.working[name].dtype))

    def _raise_together(self, problem: str, directory: Path) -> None:
        """Raise on every rank where any has a problem, so that none waits for another that gave up."""
        messages: list[str | None] = [problem]
        if self._mesh.world > 1:
            messages = [None] * self._mesh.world
            dist.all_gather_object(messages, problem)
        first = next((message for message in messages if message), None)
        if first:
            raise CheckpointError(first, where=str(directory), attempt="check the path, its permissions and free space")


def _check_names(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], ownership: Ownership) -> None:
    unknown = [name for name in state if name not in expected]
    given = {ownership.canonical.get(name, name) for name in state}
    missing = [name for name in expected if ownership.canonical.get(name, name) not in given]
    for names, what in (
        (unknown, "holds tensors that the model does not have"),
        (missing, "lacks tensors of the model"),
    ):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise CheckpointError(f"the state {what}: {shown}", attempt="load the state of the same model")


def _check_shape(name: str, values: Tensor, expected: Tensor) -> None:
    if values.shape != expected.shape:
        raise CheckpointError(
            f"`{name}` is {tuple(values.shape)} in the state and {tuple(expected.shape)} in the model",
            attempt="load the state of the same model",
        )


def _previous(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.old")


def _write(directory: Path, state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    # Tied names share a tensor, which the format does not hold: each name gets its own copy.
    save_file({name: tensor.cpu().clone() for name, tensor in state.items()}, beside / WEIGHTS, {"format": "pt"})
    previous = _previous(directory)
    shutil.rmtree(previous, ignore_errors=True)
    if directory.exists():
        os.replace(directory, previous)
    os.replace(beside, directory)
    shutil.rmtree(previous, ignore_errors=True)

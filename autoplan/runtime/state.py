"""Whole tensors under the user's names, whatever the plan: gathered, loaded, saved.

A parameter's way back: slices over the data axis (ZeRO), then shards over the tensor axis, then from its first stage to
every rank, in one order of names. Loading is each rank's own: it reads the rectangles that it stores.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoplan.capture import Capture
from autoplan.errors import StrategyError
from autoplan.plan import Coordinates
from autoplan.runtime.build import STACKED, Ownership
from autoplan.runtime.checkpoint_files import MODEL, is_checkpoint, open_checkpoint
from autoplan.runtime.collectives import AxisCommunicator, Mesh
from autoplan.runtime.data_parallel import GradientSync
from autoplan.runtime.faults import CheckpointError
from autoplan.runtime.pieces import pieces
from autoplan.runtime.stored import WEIGHTS, InMemory, Part, SafetensorsFile, Source, write_safetensors
from autoplan.runtime.together import joined, parted, runs
from autoplan.sharding.placements import Placement, Shard, assemble


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
        experts: frozenset[str] = frozenset(),
        buffers: Mapping[str, Tensor],
        buffer_owner: Mapping[str, int],
    ) -> None:
        self._capture, self._ownership, self._mesh = capture, ownership, mesh
        self._sync, self._placements, self._experts = sync, placements, experts
        self._buffers, self._buffer_owner = buffers, buffer_owner
        # Values that a load or an initialisation must still bring.
        self.lacks_values = any(parameter.is_meta for parameter in capture.graph_module.parameters())
        self._turns = {name: turn for turn, name in enumerate(ownership.holders)}

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer, whole, on every rank; tied names share one tensor."""
        whole = {name: tensor for names, tensor in self._whole_tensors() for name in names}
        return {name: whole[name] for name in self._capture.graph_module.state_dict()}

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of the parameters that have one, by the first of each one's names, on every rank."""
        names = list(self._ownership.holders)
        exist = torch.zeros(max(1, len(names)), device=self._mesh.device)
        for index, name in enumerate(names):
            held = self._sync.parameters.get(name) if self._sync is not None else None
            exist[index] = float(held is not None and held.grad is not None)
        self._mesh.max_over_world(exist)
        given = [name for name, found in zip(names, exist.tolist(), strict=False) if found]
        whole = dict(self._gather(given, lambda sync, n: sync.whole_gradient(n)))
        return {name: whole[name] for name in given}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take each rank's part of whole tensors. Raises CheckpointError naming what does not fit."""
        self.fill(InMemory(state))

    def save(self, directory: Path, config: str | None = None) -> None:
        """Write ``model.safetensors`` (and ``config.json``) beside ``directory`` and rename; rank 0 writes, a tensor or
        a few small ones in memory at a time, all wait for it."""
        whole, problem = self._whole_tensors(), ""
        if self._mesh.rank == 0:
            try:
                _write(directory, self._capture.graph_module.state_dict(), whole, config)
            except OSError as error:
                problem = f"{error.strerror or error}: {error.filename or directory}"
            except CheckpointError as error:
                problem = error.what
        for _ in whole:  # collectives: what rank 0 did not come to, it must still take part in
            pass
        self.raise_together(f"cannot write the checkpoint: {problem}" if problem else "", directory)

    def load(self, directory: Path) -> None:
        """Read what :meth:`save` or :class:`Checkpoints` wrote, under this or any other plan, this rank's part alone;
        or any safetensors files under the user's names."""
        problem, prefix = "", MODEL if is_checkpoint(directory) else ""
        source: Source
        try:
            if prefix:
                source = open_checkpoint(directory, self._mesh.rank, self._mesh.world)
            else:
                source = SafetensorsFile(_kept(directory))
        except CheckpointError as error:
            problem = error.what
        self.raise_together(problem, directory)
        self.fill(source, prefix)

    def fill(self, source: Source, prefix: str = "") -> None:
        """Read this rank's parts of parameters and buffers; ``prefix`` + name is the source's name for each."""
        shapes = {n.removeprefix(prefix): s for n, s in source.shapes.items() if n.startswith(prefix)}
        expected = self._capture.graph_module.state_dict()
        canonical = self._ownership.canonical
        _check_names(shapes, expected, self._ownership)
        for name in shapes:
            _check_shape(name, shapes[name], tuple(expected[name].shape))
        parts, given = {}, {canonical[name]: name for name in reversed(shapes) if name in canonical}
        for name, stored in self.parameters().items():
            parts[prefix + given[name]] = self.part(name, stored)
        for name in shapes:
            if name not in canonical:
                parts[prefix + name] = _unsplit(self._buffers.get(name, expected[name]))
        source.read(parts)
        self.lacks_values = False

    def require_values(self) -> None:
        """Raises StrategyError where the model was on meta and nothing has brought its values yet."""
        if self.lacks_values:
            first = next(iter(self._ownership.holders))
            raise StrategyError(
                f"the model's parameters were on `meta` and have no values yet, `{first}` first",
                where="model",
                legal="steps and saves of programs with weights; plans for models on meta",
                attempt="program.load(directory), or program.initialise(model, seed=0)",
            )

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What this rank's optimizer updates, by the first of each parameter's names."""
        return self._sync.parameters if self._sync is not None else {}

    def part(self, name: str, stored: Tensor) -> Part:
        """What this rank's ``stored``, split as the parameter ``name`` is, holds of the whole tensor."""
        assert self._sync is not None and self._mesh.at is not None
        shape = tuple(self._capture.graph_module.get_parameter(name).shape)
        expert = name in self._experts
        found = pieces(
            stored,
            shape=shape,
            placement=self._split(name),
            index=self._mesh.expert_index if expert else self._mesh.at.tensor,
            degree=self._mesh.expert_degree if expert else self._mesh.strategy.tensor,
            extent=self._sync.extent(name),
        )
        return Part(shape, found)

    def _split(self, name: str) -> Placement | None:
        """How the parameter is split: a run of experts a rank of the expert axis, or over the tensor axis."""
        return STACKED if name in self._experts else self._placements.get(name)

    def is_whole(self, name: str) -> bool:
        """Whether every rank that holds the parameter holds all of it."""
        assert self._sync is not None
        return self._sync.extent(name) is None and not isinstance(self._split(name), Shard)

    def writes(self, name: str) -> bool:
        """Whether this rank writes its part of the parameter, and of its optimizer state: of ranks that hold the same,
        one does, in turn over the parameters."""
        at = self._mesh.at
        assert at is not None and self._sync is not None
        copies, index = 1, 0
        if self._sync.extent(name) is None:
            mesh = self._mesh.of_experts() if name in self._experts else self._mesh
            assert mesh.at is not None
            copies, index = mesh.strategy.data, mesh.at.data
        if not isinstance(self._placements.get(name), Shard):
            copies, index = copies * self._mesh.strategy.tensor, index * self._mesh.strategy.tensor + at.tensor
        return self._ownership.holders[name][0] == at.pipeline and self._turns[name] % copies == index

    def parts(self) -> dict[str, Part]:
        """This rank's parts of parameters, and the persistent buffers, of which it writes the only copy."""
        self.require_values()
        found = {name: self.part(name, stored) for name, stored in self.parameters().items() if self.writes(name)}
        for name, value in self._capture.graph_module.state_dict().items():
            if name not in self._ownership.canonical and self._mesh.rank == self._buffer_rank(name):
                found[name] = _unsplit(self._buffers.get(name, value))
        return found

    def raise_together(self, problem: str, directory: Path) -> None:
        """Raise on every rank where any has a problem, so that none waits for another that gave up."""
        messages: list[str | None] = [problem]
        if self._mesh.world > 1:
            messages = [None] * self._mesh.world
            dist.all_gather_object(messages, problem)
        first = next((message for message in messages if message), None)
        if first:
            raise CheckpointError(first, where=str(directory), attempt="check the path, its permissions and free space")

    # ---------------------------------------------------------------------------------------------------------- details

    def _gather(
        self, names: Iterable[str], read: Callable[[GradientSync, str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Parameters, or their gradients, whole on every rank, stage by stage; those of a stage share collectives."""
        patterns = {name: self._capture.graph_module.get_parameter(name) for name in names}
        owners = {name: self._ownership.holders[name][0] for name in patterns}
        in_turn, at = sorted(patterns, key=owners.__getitem__), self._mesh.at
        for run in runs(in_turn, lambda n: (owners[n], patterns[n].dtype), lambda n: patterns[n].nbytes):
            if self._sync is not None and at is not None and at.pipeline == owners[run[0]]:
                whole = self._assembled({name: read(self._sync, name).to(patterns[name].dtype) for name in run})
            else:
                whole = [torch.empty(patterns[n].shape, dtype=patterns[n].dtype, device=self._mesh.device) for n in run]
            yield from zip(run, self._sent_from(owners[run[0]], whole), strict=True)

    def _assembled(self, local: Mapping[str, Tensor]) -> list[Tensor]:
        """Whole tensors of what this rank holds of them, a collective an axis that splits some."""
        whole = dict(local)
        for axis in ("tensor", "expert"):
            placements = {n: self._split(n) for n in local if (n in self._experts) == (axis == "expert")}
            split = {name: placement for name, placement in placements.items() if isinstance(placement, Shard)}
            if not split:
                continue
            rows = AxisCommunicator(self._mesh).all_gather(joined([local[name] for name in split]), axis)
            of_ranks = [parted(row, [local[name].shape for name in split]) for row in rows]
            for (name, placement), shards in zip(split.items(), zip(*of_ranks, strict=True), strict=True):
                whole[name] = assemble(list(shards), placement)
        return list(whole.values())

    def _sent_from(self, stage: int, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of the tensors of ``stage``'s first rank, on every rank."""
        if self._mesh.world > 1 and len(tensors) > 1:
            row = self._mesh.broadcast(joined(tensors), source=self._first_rank(stage))
            return [part.clone() for part in parted(row, [tensor.shape for tensor in tensors])]
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        return [self._mesh.broadcast(copy, source=self._first_rank(stage)) for copy in copies]

    def _first_rank(self, stage: int) -> int:
        return self._mesh.strategy.rank(Coordinates(stage, 0, 0))

    def _whole_tensors(self) -> Iterator[tuple[list[str], Tensor]]:
        """Every tensor of the state dict and the names that it has: parameters, then buffers."""
        self.require_values()
        state, canonical = self._capture.graph_module.state_dict(), self._ownership.canonical
        names: dict[str, list[str]] = {}
        for name in state:
            names.setdefault(canonical.get(name, name), []).append(name)
        for name, whole in self._gather((n for n in names if n in canonical), lambda sync, n: sync.whole(n)):
            yield names[name], whole
        for name, all_of_them in names.items():
            if name not in canonical:
                yield all_of_them, self._buffer(name, state[name])

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        """A buffer that the forward writes comes from the stage that does; others are alike everywhere."""
        mesh = self._mesh
        current = self._buffers.get(name, value.to(mesh.device)).detach().clone(memory_format=torch.contiguous_format)
        return mesh.broadcast(current, source=self._buffer_rank(name)) if name in self._buffer_owner else current

    def _buffer_rank(self, name: str) -> int:
        return self._first_rank(self._buffer_owner.get(name, 0))


def _unsplit(tensor: Tensor) -> Part:
    return Part(tuple(tensor.shape), pieces(tensor, shape=tensor.shape))


def _kept(directory: Path) -> Path:
    """``directory``, or what it replaced where the writer died between its two renames."""
    previous = _previous(directory)
    return previous if not directory.exists() and previous.exists() else directory


def _check_names(state: Mapping[str, tuple[int, ...]], expected: Mapping[str, Tensor], ownership: Ownership) -> None:
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


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"`{name}` is {shape} in the state and {expected} in the model",
            attempt="load the state of the same model",
        )


def _previous(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.old")


def _write(
    directory: Path, patterns: Mapping[str, Tensor], whole: Iterator[tuple[list[str], Tensor]], config: str | None
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    write_safetensors(beside / WEIGHTS, patterns, whole)  # tied names each get their own copy
    if config is not None:
        (beside / "config.json").write_text(config)
    previous = _previous(directory)
    shutil.rmtree(previous, ignore_errors=True)
    if directory.exists():
        os.replace(directory, previous)
    os.replace(beside, directory)
    shutil.rmtree(previous, ignore_errors=True)

"""Checkpoints of a whole training run: saved while it goes on, and resumed under any plan on any number of GPUs.

    checkpoints = autoplan.Checkpoints("run/", program, optimizer, scheduler=scheduler)
    start = checkpoints.resume()                  # None: nothing to resume from
    for step in range(start.step if start else 0, steps):
        program.step(batch_of(step)); optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            checkpoints.save(step + 1, data={"epoch": epoch})
    checkpoints.wait()

Saving copies what the rank holds to host memory and returns; a thread writes it, on a process group of its own (gloo,
so it may communicate beside the training). See :mod:`autoplan.runtime.checkpoint_files` for what is on disk.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from autoplan.runtime import checkpoint_files as files
from autoplan.runtime.checkpoint_files import MODEL, TRAINING, Manifest
from autoplan.runtime.faults import CheckpointError, RankFault
from autoplan.runtime.launch import WRITER_NAME, group_timeout
from autoplan.runtime.optimizer_state import load_state, merged, state_of
from autoplan.runtime.program import Program
from autoplan.runtime.progress import WATCH
from autoplan.runtime.stored import Part

if TYPE_CHECKING:
    from autoplan.runtime.distributed_file import DistributedFile

_LOG = logging.getLogger(__name__)
_ATTEMPT = "check the path, its permissions and free space; all ranks must see one file system"


class Stateful(Protocol):
    """What keeps its state as torch's schedulers, scalers and data loaders do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """``step`` and ``data`` as they were given to :meth:`Checkpoints.save`, and where they were."""

    step: int
    data: Any
    directory: Path


class Checkpoints:
    """The checkpoints below ``directory``, which all ranks must see; made on every rank (a collective).

    ``others``: objects with ``state_dict`` and ``load_state_dict`` that are alike on every rank, by name: schedulers,
    a gradient scaler, a data loader. ``keep``: how many of the latest stay on disk.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        program: Program,
        optimizer: Optimizer | None = None,
        *,
        keep: int = 2,
        **others: Stateful,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep = {keep}", where="Checkpoints", legal="1 or more")
        self.directory = Path(directory)
        self._program, self._optimizer, self._others, self._keep = program, optimizer, others, keep
        self._tensors = program._rank_part().state
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = program._rank_part().mesh.device.type
            self._group = dist.new_group(backend="gloo", timeout=group_timeout(device))
        self._rank = 0 if self._group is None else dist.get_rank()
        self._world = 1 if self._group is None else dist.get_world_size()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    # ---------------------------------------------------------------------------------------------------------- writing

    def save(self, step: int, *, data: Any = None) -> Path:
        """Begin to write a checkpoint of now, after ``step`` steps; returns the directory that it will have.

        ``data``: where the input stands, anything of plain Python values and tensors; rank 0's is kept. One checkpoint
        is written at a time: where the one before is not done, this waits for it, and raises its error
        (CheckpointError on every rank).
        """
        self.wait()
        parts = {MODEL + name: part for name, part in self._tensors.parts().items()}
        small: dict[str, Any] = {}
        if self._optimizer is not None:
            states, small = state_of(self._optimizer, self._tensors)
            parts |= states
        copies = {name: part.copied() for name, part in parts.items()}
        training = {
            "step": step,
            "program_steps": self._program.steps,
            "data": data,
            "others": {name: other.state_dict() for name, other in self._others.items()},
        }
        mine = pickle.dumps((small, _random_state()))
        directory = files.directory_of(self.directory, step)
        # Not a daemon: a script that ends lets the last checkpoint be written.
        self._writer = threading.Thread(
            target=self._write, args=(directory, copies, training, mine), name=f"{WRITER_NAME}-{step}"
        )
        self._writer.start()
        return directory

    def wait(self) -> None:
        """Until what was saved is on disk. Raises what went wrong with it."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, directory: Path, parts: dict[str, Part], training: dict[str, Any], mine: bytes) -> None:
        from autoplan.runtime.distributed_file import write

        try:
            with WATCH.writer.during("checkpoint", step=training["step"]):
                self._together(directory, lambda: files.begin(directory) if self._rank == 0 else None)
                write(files.part_of(directory), parts, self._group)
                self._together(directory, lambda: self._measure(directory))
                every = self._gather((self._measured, mine))
                first = self._rank == 0
                self._together(directory, lambda: self._finish(directory, training, every) if first else None)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:
            step = training["step"]
            self._failure = RankFault(
                f"rank {self._rank}, step {step}, checkpoint: {type(error).__name__}: {error}",
                rank=self._rank,
                step=step,
                action="checkpoint",
                where=str(directory),
            )
            self._failure.__cause__ = error

    def _measure(self, directory: Path) -> None:
        """Note the sizes and checksums of the files that this rank wrote."""
        own = files.part_of(directory).glob(f"__{self._rank}_*")
        self._measured = {path.name: files.measure(path) for path in own}

    def _finish(self, directory: Path, training: dict[str, Any], every: list[tuple[dict, bytes]]) -> None:
        """On rank 0: what is small, the manifest, and the name."""
        part = files.part_of(directory)
        ranks = [pickle.loads(small) for _, small in every]
        training |= {"random": [state for _, state in ranks]}
        if self._optimizer is not None:
            training |= {"optimizer": merged(small for small, _ in ranks)}
        with (part / TRAINING).open("wb") as stream:
            torch.save(training, stream)
            stream.flush()
            os.fsync(stream.fileno())
        written = {name: known for measured, _ in every for name, known in measured.items()}
        written |= {name: files.measure(part / name) for name in (files.METADATA, TRAINING)}
        plan = self._program.plan.strategy.describe()
        Manifest(step=training["step"], plan=plan, world=self._world, files=written).write(part)
        files.publish(directory, keep=self._keep)

    def _together(self, directory: Path, act: Any) -> None:
        """Do something on this rank, and raise on every rank where it failed on any."""
        problem = ""
        try:
            act()
        except OSError as error:
            problem = f"{error.strerror or error}: {error.filename or directory}"
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            problem = str(error)
        for rank, found in enumerate(self._gather(problem)):
            if found:
                raise CheckpointError(
                    f"rank {rank} cannot write the checkpoint: {found}", where=str(directory), attempt=_ATTEMPT
                )

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        every: list[Any] = [None] * self._world
        dist.all_gather_object(every, value, group=self._group)
        return every

    # ---------------------------------------------------------------------------------------------------------- reading

    def resume(self) -> Resumed | None:
        """Load the newest checkpoint that is whole, under whatever plan it was saved; None where there is none at all.

        A damaged one is named in a warning, and the one before it is taken. Raises CheckpointError where all are
        damaged, or where they are of another model.
        """
        self.wait()
        known = self._gather(files.checkpoints_in(self.directory))[0]
        problems = []
        for _, directory in known:
            try:
                source = self._open(directory)
            except CheckpointError as error:
                problems.append(error.what)
                _LOG.warning("autoplan: skipped a checkpoint: %s", error.what)
            else:
                return self._load(directory, source)
        if problems:
            raise CheckpointError(
                f"none of {len(known)} checkpoints can be read: {problems[0]}",
                where=str(self.directory),
                attempt="start from another directory, or from the beginning",
            )
        return None

    def load(self, directory: str | os.PathLike[str]) -> Resumed:
        """Load this one checkpoint. Raises CheckpointError naming the file that is missing or damaged."""
        self.wait()
        return self._load(Path(directory), self._open(Path(directory)))

    def _open(self, directory: Path) -> DistributedFile:
        """Verified by all ranks together, each a share of the files."""
        problem = ""
        try:
            source = files.open_checkpoint(directory, self._rank, self._world)
        except CheckpointError as error:
            problem = error.what
        found = next((each for each in self._gather(problem) if each), None)
        if found:
            raise CheckpointError(found, where=str(directory))
        return source

    def _load(self, directory: Path, source: DistributedFile) -> Resumed:
        training = _read_training(directory / TRAINING)
        if self._optimizer is not None and "optimizer" not in training:
            raise CheckpointError("the checkpoint was saved without an optimizer", where=str(directory))
        missing = sorted(set(self._others) - set(training["others"]))
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {', '.join(missing)}",
                where=str(directory),
                legal=", ".join(training["others"]) or "none was saved",
            )
        self._tensors.fill(source, MODEL)
        if self._optimizer is not None:
            load_state(self._optimizer, self._tensors, source, training["optimizer"])
        for name, other in self._others.items():
            other.load_state_dict(training["others"][name])
        states = training["random"]
        _restore_random_state(states[self._rank if self._rank < len(states) else 0])
        self._program.steps = training["program_steps"]
        return Resumed(step=training["step"], data=training["data"], directory=directory)


def _read_training(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than plain values and tensors: {str(error).splitlines()[0]}",
            attempt="where you trust the file: torch.serialization.add_safe_globals([...]) before loading",
        ) from None


def _random_state() -> dict[str, Any]:
    """Of torch on the CPU and this rank's GPU, of Python and, where it is in use, of numpy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))

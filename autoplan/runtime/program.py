"""Program: a captured model under a plan, as the calling rank runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.capture import Capture
from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers import LayerGraph
from autoplan.plan import Plan
from autoplan.runtime.build import Builder, check_executable
from autoplan.runtime.code import stage_code
from autoplan.runtime.faults import RankFault
from autoplan.runtime.initialise import Initialised
from autoplan.runtime.launch import ensure_process_group, how_to_launch
from autoplan.runtime.loader import PlannedLoader, loader_options
from autoplan.runtime.rank_part import RankPart
from autoplan.sharding import Sharding


class Program:
    """A planned model: ``step`` trains a global batch, an optimizer of the user's over ``parameters()`` updates it.

    Parameters of a rank are plain ``nn.Parameter`` under the user's names: the user's own objects where they are whole
    and on the device, this rank's part where the plan splits them (along the tensor axis by a placement; under ZeRO
    as flat slices, see :mod:`autoplan.runtime.data_parallel`), float32 masters where the plan's precision keeps them of
    16-bit weights (:mod:`autoplan.runtime.masters`). The rank's part is made at the first use inside a
    process group, or at once where the plan uses one GPU.

    Raises StrategyError for a plan that the runtime cannot execute exactly, and what the passes raise.
    """

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        layers: LayerGraph,
        *,
        cluster: Cluster | None = None,
        sharding: Sharding | None = None,
        device: str | torch.device | None = None,
        config: str | None = None,
    ) -> None:
        """``config``: a Hugging Face model's ``config.json``, saved beside its weights."""
        check_executable(capture, plan)
        self._capture, self._plan, self._layers = capture, plan, layers
        self._device = str(device) if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
        self._builder = Builder(capture, plan, layers, cluster, sharding)
        self._config = config
        self._builder.graphs(0)  # what the passes refuse, they refuse now and not at the first step
        self._part: RankPart | None = None
        self._bound_to = 0
        self.steps = self.samples = 0  # taken so far
        self.loss = float("nan")  # of the latest step
        self._nothing = nn.Parameter(torch.empty(0))

    @property
    def plan(self) -> Plan:
        return self._plan

    # --------------------------------------------------------------------------------------------------------- training

    def step(self, batch: Any, local: bool = False) -> float:
        """Forward and backward of a global batch through the schedule; gradients are summed over the whole batch.

        Every rank passes the whole global batch and its part is taken, or, with ``local``, the rows of its own data
        rank. A batch of another size than planned runs in micro-batches of at most the planned size. Returns the loss
        (the original's, over the global batch) on every rank; gradients add to those there are, as in torch.

        Raises RuntimeFault where a rank fails, or where the ranks are not there; StrategyError for a batch that does
        not divide over the data ranks; CaptureError for one that is not like the example.
        """
        part = self._rank_part()
        self.loss = part.step(batch, local=local, step=self.steps)
        self.steps += 1
        self.samples += part.samples
        return self.loss

    def evaluate(self, batch: Any) -> float:
        """The loss of a global batch after ``eval()``, on every rank: forwards alone, with what the optimizer made of
        the parameters. Nothing is kept or changed: no gradient, no statistics, no random numbers.

        Every rank passes the whole batch. It may be of any size from one sample a data rank on, and then is cut as
        evenly as it divides; there may be fewer micro-batches than stages. Dropout and BatchNorm evaluate; what the
        model's own code did under ``if self.training`` while it was traced stays as it was.

        Raises StrategyError for a smaller batch, and for a graph that has no form for evaluation (see
        :mod:`autoplan.passes.evaluation`).
        """
        return self._rank_part().evaluate(batch, step=self.steps)

    def dataloader(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        **options: Any,
    ) -> PlannedLoader:
        """Batches of this rank's rows of ``dataset``, for ``step(batch, local=True)``; resumes by ``state_dict()``.

        ``dataset`` has a length and items by number. ``global_batch``: samples a step, the plan's unless given.
        ``options`` go to torch's ``DataLoader`` (collate_fn, num_workers, pin_memory, ...). Raises StrategyError for a
        dataset that ranks cannot take rows of, or that holds no whole batch.
        """
        mesh = self._rank_part().mesh
        return PlannedLoader(
            dataset,
            strategy=self._plan.strategy,
            data_rank=mesh.data_index if mesh.at is not None else 0,
            global_batch=global_batch or self._plan.global_batch,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **loader_options(**options),
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the user's names, in the user's order."""
        sync = self._rank_part().sync
        yield from sync.parameters.items() if sync is not None else ()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A rank that holds none (the plan may use fewer GPUs than there are) gives one of no elements, because torch's
        optimizers refuse an empty list: the training loop is the same on every rank.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [self._nothing]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this rank's gradients, or fill them with zeros."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that the norm of all of them is at most ``max_norm``, as
        ``torch.nn.utils.clip_grad_norm_`` does in a single process; returns the norm before. A collective over all
        ranks: each parameter counts once, however many ranks hold it."""
        part = self._rank_part()
        total = part.gradient_norm(float(norm_type))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return total

    # ------------------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Tensor]:
        """Whole tensors under the user's names, tied aliases and buffers included, on every rank (a collective)."""
        return self._rank_part().state.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole tensors under the user's names."""
        self._rank_part().state.load_state_dict(state)

    def initialise(self, model: nn.Module, *, seed: int, init: Callable[[nn.Module], None] | None = None) -> None:
        """Give a model on meta its first values: each rank makes the modules of its own stages one at a time, keeps its
        part, and all plans get the same weights from one ``seed``.

        ``model``: what was compiled. ``init`` initialises one module's own parameters, as for ``model.apply(init)``;
        without, transformers' ``_init_weights`` or the modules' ``reset_parameters`` do. Raises StrategyError naming a
        module that has neither.
        """
        self._rank_part().state.fill(Initialised(model, seed=seed, init=init))

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients under the user's names, on every rank (a collective): for checks, not for speed."""
        return self._rank_part().state.gradients()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the whole weights to ``directory/model.safetensors``, beside and renamed (a collective), and a Hugging
        Face model's config: ``from_pretrained(directory)`` loads them. Host memory holds a tensor at a time. Without
        the optimizer's state: see :class:`Checkpoints`."""
        self._rank_part().state.save(Path(directory), self._config)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Read the weights of what :meth:`save` or :class:`Checkpoints` wrote under any plan, or of any safetensors
        files under the user's names: each rank its own part of them (a collective)."""
        self._rank_part().state.load(Path(directory))

    # ------------------------------------------------------------------------------------------------------- inspection

    def code(self, rank: int) -> str:
        """What ``rank`` runs, as readable Python; needs no process group."""
        strategy = self._plan.strategy
        if not 0 <= rank < self._plan.gpus:
            raise StrategyError(f"there is no rank {rank}", where="rank", legal=f"0 to {self._plan.gpus - 1}")
        if rank >= strategy.gpus:
            return f"# Rank {rank} is idle: the plan uses {strategy.gpus} of {self._plan.gpus} GPUs.\n"
        at = strategy.coordinates(rank)
        return stage_code(self._builder.graphs(at.tensor), strategy, rank)

    def _repr_html_(self) -> str:
        from autoplan.report.notebook import program_html  # a room behind this one, for notebooks alone

        return program_html(self)

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches whose activations this rank held at once in the latest step."""
        interpreter = self._rank_part().interpreter
        return interpreter.peak_in_flight if interpreter is not None else 0

    def emit(self, directory: str | os.PathLike[str]) -> Path:
        """Write this program to ``directory`` as Python that needs only torch, for ``torchrun train.py``; returns it.

        Needs no process group. Raises StrategyError for what emitted programs cannot do, AutoplanError where the
        directory holds something already.
        """
        from autoplan.export import emit  # a room behind this one, which the program only lends its name

        return emit(self._capture, self._plan, self._layers, self._builder, directory)

    # ---------------------------------------------------------------------------------------------------------- binding

    def _rank_part(self) -> RankPart:
        """This rank's part, made at first use. A forked child makes its own, whatever its parent had."""
        if self._part is None or self._bound_to != os.getpid():
            self._part = self._bind()
            self._bound_to = os.getpid()
        return self._part

    def _bind(self) -> RankPart:
        _require_values(self._capture)
        world = ensure_process_group(self._device)
        used = self._plan.strategy.gpus
        if world == 1 and used > 1:
            raise RankFault(
                f"this program runs on {used} ranks, and this process is no rank of {used}",
                where="program.step",
                legal=f"{self._plan.gpus} processes, one a GPU",
                attempt=how_to_launch(self._plan.gpus, self._device),
            )
        if world not in (1, self._plan.gpus):
            raise StrategyError(
                f"the plan is for {self._plan.gpus} GPUs and {world} processes are running",
                legal=f"{self._plan.gpus} processes, one a GPU",
                attempt=f"{how_to_launch(self._plan.gpus, self._device)}; or plan for {world} GPUs",
            )
        return RankPart(self._capture, self._plan, self._builder, _local_device(self._device))


def _require_values(capture: Capture) -> None:
    """Parameters may be on meta until they are loaded; buffers may not, because some are in no file."""
    without = [name for name, tensor in capture.graph_module.named_buffers() if tensor.is_meta]
    if without:
        raise StrategyError(
            f"{len(without)} of the model's buffers are on `meta` and have no values, `{without[0]}` first",
            where="model",
            legal="plans for models on meta; programs of models whose parameters alone are on meta",
            attempt="build the model under autoplan.empty_weights() instead of torch.device('meta')",
        )


def _local_device(device: str) -> torch.device:
    if device.startswith("cuda"):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")

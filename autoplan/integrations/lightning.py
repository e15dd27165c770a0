"""A Lightning strategy: ``Trainer(strategy=PlannedStrategy(...))`` trains a module's model under a plan.

    class Language(LightningModule):
        def training_step(self, batch, index):
            return self.model(**batch).loss           # `model` is what is planned

    strategy = PlannedStrategy(example_inputs=batch)  # compile's arguments
    Trainer(strategy=strategy, devices=8).fit(Language(), loader)

Inside ``training_step`` a call of the model runs the whole planned step, and returns its loss: as a tensor, or as
``.loss`` where the model returns an output object. Data loaders are given a sampler over the data axis, so the batch
size is a data rank's. Validation brings the whole weights into the model on every rank first. Read in Lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

import autoplan
from autoplan.errors import ModelError, StrategyError
from autoplan.integrations.module import PlannedModule
from autoplan.runtime import Checkpoints, Program

_BESIDE = ".autoplan"  # the directory with the program's state, beside each of Lightning's checkpoint files


class PlannedStrategy(DDPStrategy):
    """``attribute`` names the planned submodule, which must hold all parameters; ``plan`` and the rest go to
    :func:`autoplan.compile` (example_inputs, global_batch, strategy, ...)."""

    def __init__(self, *, attribute: str = "model", program: Program | None = None, **compiled: Any) -> None:
        super().__init__(precision_plugin=_PlannedPrecision())
        self._attribute, self._program, self._arguments = attribute, program, compiled

    @property
    def program(self) -> Program:
        if self._program is None:
            raise StrategyError("the program is made when the Trainer starts", where="PlannedStrategy.program")
        return self._program

    # --------------------------------------------------------------------------------------------------------- set up

    def setup(self, trainer: Any) -> None:
        # trainer.precision is that of this strategy's own plugin, whatever was asked for.
        asked = getattr(trainer._accelerator_connector, "_precision_flag", None) or trainer.precision
        if asked != "32-true":
            raise StrategyError(
                f"precision {asked}: the plan decides that",
                where="Trainer(precision=)",
                legal="the default",
                attempt="convert the model before: model.to(torch.bfloat16)",
            )
        module = self.lightning_module
        planned = _planned(module, self._attribute)
        if self._program is None:
            device = "cpu" if self.root_device.type == "cpu" else "cuda"
            self._program = autoplan.compile(planned, device=device, **self._arguments)
        self._stands_for(module, planned)
        # What DDPStrategy would do next wraps the module; the program synchronises by itself.
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.program = self._program
        self._kept: Checkpoints | None = None  # of this run: its optimizers are new ones

    def _stands_for(self, module: nn.Module, planned: nn.Module) -> None:
        """The program's parameters for the module's, and its step for the planned model's forward in training."""
        program = self.program
        step, alone = PlannedModule(program), planned.forward
        prefix = f"{self._attribute}."

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (planned.training and torch.is_grad_enabled()):
                return alone(*args, **kwargs)
            loss = step(*args, **kwargs)
            return SimpleNamespace(loss=loss) if hasattr(planned, "config") else loss

        def named_parameters(*args: Any, **kwargs: Any) -> Any:
            return ((prefix + name, parameter) for name, parameter in program.named_parameters())

        planned.forward = forward
        module.parameters = lambda recurse=True: program.parameters()  # type: ignore[method-assign]
        module.named_parameters = named_parameters  # type: ignore[method-assign]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        program, rank = self.program, self.global_rank
        strategy = program.plan.strategy
        at = strategy.coordinates(rank) if rank < strategy.gpus else strategy.coordinates(0)
        return {"num_replicas": strategy.data, "rank": at.data}

    # ------------------------------------------------------------------------------------------------- whole weights

    def on_validation_start(self) -> None:
        self._take_whole_weights()

    def on_test_start(self) -> None:
        self._take_whole_weights()

    def on_predict_start(self) -> None:
        self._take_whole_weights()

    def _take_whole_weights(self) -> None:
        planned = _planned(self.lightning_module, self._attribute)
        planned.load_state_dict(self.program.state_dict())
        planned.to(self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        prefix = f"{self._attribute}."
        return {prefix + name: tensor for name, tensor in self.program.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        prefix = f"{self._attribute}."
        state = checkpoint["state_dict"]
        self.program.load_state_dict({name[len(prefix) :]: tensor for name, tensor in state.items()})

    # --------------------------------------------------------------------------------------------- optimizer's state

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # there is no program before

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return {}  # sharded: it is written beside, see save_checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        written = self._checkpoints(filepath)
        written.save(int(checkpoint["global_step"]))
        written.wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._checkpoints(self._loaded_from).resume() is None:
            raise StrategyError(
                f"{self._loaded_from} has no state of a program beside it",
                where="ckpt_path",
                legal=f"a checkpoint with its directory {Path(self._loaded_from).name}{_BESIDE}",
            )

    def _checkpoints(self, filepath: Any) -> Checkpoints:
        """One a run, wherever it writes: each has a process group of its own."""
        if self._kept is None:
            self._kept = Checkpoints(filepath, self.program, self.optimizers[0], keep=1)
        self._kept.directory = Path(f"{filepath}{_BESIDE}")
        return self._kept


class _PlannedPrecision(Precision):
    """Clips by the norm of the whole gradient, each parameter counted once."""

    program: Program | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.program is not None
        self.program.clip_grad_norm_(float(clip_val))


def _planned(module: nn.Module, attribute: str) -> nn.Module:
    planned = getattr(module, attribute, None)
    if not isinstance(planned, nn.Module):
        named = [name for name, _ in module.named_children()]
        raise ModelError(
            f"{type(module).__name__} has no submodule `{attribute}` to plan",
            where="PlannedStrategy(attribute=)",
            legal=", ".join(named) or "the name of a submodule that returns the loss",
        )
    inside = {id(parameter) for parameter in planned.parameters()}
    outside = [name for name, p in nn.Module.named_parameters(module) if id(p) not in inside and p.requires_grad]
    if outside:
        raise ModelError(
            f"{len(outside)} trainable parameters are outside `{attribute}`, `{outside[0]}` first",
            where="PlannedStrategy(attribute=)",
            attempt=f"move them into `{attribute}`, or freeze them",
        )
    return planned

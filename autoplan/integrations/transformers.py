"""A program in ``transformers.Trainer``: its loop, callbacks, logging and checkpoints around a planned step.

    program = autoplan.compile(model, gpus=8)                # every rank, under torchrun
    trainer = PlannedTrainer(program, model=model, args=TrainingArguments(...), train_dataset=dataset)
    trainer.train()

The plan's global batch is a step of the trainer, whatever ``per_device_train_batch_size`` says. Needs accelerate, as
the Trainer itself does. Read in transformers 5.24.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from autoplan.errors import StrategyError
from autoplan.integrations.module import PlannedModule
from autoplan.runtime import Checkpoints, Program
from autoplan.runtime.loader import PlannedLoader

_CHECKPOINT = "autoplan"  # inside each of the Trainer's checkpoint directories


class PlannedTrainer(Trainer):
    """Trains ``program``; ``model`` is the module that it was compiled from.

    Everything else as for ``Trainer``. ``evaluate`` and ``predict`` bring the whole weights into ``model`` on every
    rank first, so they need a model that fits one device. ``save_model`` writes what ``from_pretrained`` loads;
    checkpoints resume under another plan. Raises StrategyError for settings that the plan decides.
    """

    optimizer: Any

    def __init__(self, program: Program, *, model: nn.Module, args: TrainingArguments, **others: Any) -> None:
        _check(args, others)
        if args.torch_compile and not program.plan.compiled:
            raise _refused("torch_compile", "autoplan.compile(..., compiled=True)")
        self._program = program
        super().__init__(model=model, args=args, **others)
        if self.label_smoother is not None:
            raise _refused("label_smoothing_factor", "put it into the model's loss, and compile again")

    # ------------------------------------------------------------------------------------------------------- the loop

    def get_train_dataloader(self) -> PlannedLoader:
        """This rank's rows of every global batch, shuffled by ``data_seed`` or ``seed``."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        self._kept: Checkpoints | None = None  # of this run: its loader and scheduler are new ones
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._loader = self._program.dataloader(
            self.train_dataset,
            shuffle=True,
            seed=seed,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="Training"),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        return self._loader

    def num_examples(self, dataloader: Any) -> int:
        if isinstance(dataloader, PlannedLoader):
            return len(dataloader) * dataloader.global_batch
        return super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return self._program.plan.global_batch

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a global batch; its loss is the whole batch's, on every rank."""
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        return torch.tensor(self._program.step(dict(inputs), local=True), device=self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None  # the program weighs micro-batches by itself

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        # Another module than `self.model`: so the Trainer leaves it to itself and wraps it in nothing of its own.
        return PlannedModule(self._program) if training else model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The program has its parts where they belong; the whole model stays where it is."""

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._program.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> float:
        return float(self._program.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of ``args`` over this rank's parameters, with the model's own choice of what decays."""
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(self.model))
            named = {n: p for n, p in self._program.named_parameters() if p.requires_grad}
            groups: list[dict[str, Any]] = [
                {"params": [p for n, p in named.items() if n in decayed], "weight_decay": self.args.weight_decay},
                {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
            ]
            if not named:
                groups = [{"params": list(self._program.parameters())}]
            chosen, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = chosen([group for group in groups if group["params"]], **options)
        return self.optimizer

    # ------------------------------------------------------------------------------------------------- whole weights

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._take_whole_weights()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._take_whole_weights()
        return super().predict(*args, **kwargs)

    def _take_whole_weights(self) -> None:
        self.model.load_state_dict(self._program.state_dict())
        self.model.to(self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights for ``from_pretrained``, a tensor at a time (a collective)."""
        directory = Path(output_dir or self.args.output_dir)
        self._program.save(directory)
        if self.args.should_save:
            if hasattr(self.model, "config"):
                self.model.config.save_pretrained(directory)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(directory)
            torch.save(self.args, directory / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_best_model(self) -> None:
        """The program has the best weights too, so that what is evaluated and saved afterwards is theirs."""
        super()._load_best_model()
        self._program.load_state_dict(self.model.state_dict())

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _checkpoints(self, directory: str) -> Checkpoints:
        """One a run, wherever it writes: each has a process group of its own."""
        if self._kept is None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper around it
            self._kept = Checkpoints(
                directory, self._program, optimizer, scheduler=self.lr_scheduler, loader=self._loader
            )
        self._kept.directory = Path(directory) / _CHECKPOINT
        return self._kept

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints = self._checkpoints(output_dir)
        checkpoints.save(self.state.global_step)
        checkpoints.wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._checkpoints(checkpoint).resume() is None:
            raise StrategyError(
                f"{checkpoint} has no state of a program to resume from",
                where="resume_from_checkpoint",
                legal="a checkpoint of this Trainer, saved without save_only_model",
            )

    def _run_epoch(self, **loop: Any) -> None:
        # The loader stands where the checkpoint left it; the Trainer must not skip batches again.
        loop["steps_trained_in_current_epoch"] = 0
        super()._run_epoch(**loop)


def _check(args: TrainingArguments, others: dict[str, Any]) -> None:
    if args.bf16 or args.fp16:
        raise _refused("bf16 and fp16", "convert the model before it is compiled: model.to(torch.bfloat16)")
    if args.auto_find_batch_size:
        raise _refused("auto_find_batch_size", "plan with another global batch")
    if others.get("compute_loss_func") is not None:
        raise _refused("compute_loss_func", "give autoplan.compile(..., loss_fn=...) instead")
    if args.deepspeed or args.fsdp:
        raise _refused("deepspeed and fsdp", "leave them out: the plan shards by itself")
    _check_step(args)


def _check_step(args: TrainingArguments) -> None:
    """What the Trainer would do to its model, which is not the one that trains."""
    if args.gradient_accumulation_steps > 1:
        raise _refused(
            "gradient_accumulation_steps",
            "leave it out: a step is the plan's global batch, in its micro-batches; autoplan.compile(global_batch=...)",
        )
    if args.gradient_checkpointing:
        raise _refused("gradient_checkpointing", 'autoplan.compile(..., strategy={"recompute": "full"})')
    if args.use_liger_kernel:
        raise _refused("use_liger_kernel", "put the kernels into the model before it is compiled")
    if args.neftune_noise_alpha:
        raise _refused("neftune_noise_alpha", "put the noise into the model's forward before it is compiled")


def _refused(what: str, attempt: str) -> StrategyError:
    return StrategyError(f"{what}: the plan decides that", where="TrainingArguments", attempt=attempt)

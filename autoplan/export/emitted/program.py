"""The training step: this rank's stages, parameters and schedule."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import model
import parallel
from experts import Apart  # if EXPERT
from gradients import Gradients  # if DENSE
from parallel import DEVICE, Mesh, Parameters, Pipeline, Spec


class Program:
    """``step(batch)`` leaves gradients of the whole batch on ``parameters()``; an optimizer of yours updates them.

    ``weights``: a directory of files with whole tensors under the model's own names (of :meth:`save` under any split,
    or of ``torch.save(model.state_dict(), ...)``), None for random ones. ``compiler``: a backend of torch.compile.
    """

    def __init__(self, weights: str | Path | None = None, seed: int = 0, compiler: str | None = None) -> None:
        edges = [(value.source, reader) for value in model.VALUES for reader in value.readers]  # if BRANCHES
        edges = [(s, s + 1) for s in range(len(model.VALUES))]  # if CHAIN
        self.mesh = mesh = Mesh(model.PIPELINE, model.DATA, model.TENSOR, edges)  # if NOCONTEXT
        self.mesh = mesh = Mesh(model.PIPELINE, model.DATA * model.CONTEXT, model.TENSOR, edges)  # if CONTEXT
        mesh.set_inside_data(parallel.CONTEXT_AXIS, model.CONTEXT)  # if CONTEXT
        mesh.set_inside_data(parallel.EXPERT_AXIS, model.EXPERT)  # if EXPERT
        stages = [stage for stage in range(len(model.STAGES)) if stage % model.PIPELINE == mesh.pipeline_rank]
        self.specs = list({spec.name: spec for stage in stages for spec in model.specs(stage)}.values())
        tensors = parallel.load(self.specs, weights) if weights else _random(self.specs, seed)
        self.gradients = Gradients(mesh, self.specs, tensors)  # if DENSE
        self.gradients = Apart(mesh, self.specs, tensors)  # if EXPERT
        self.root = self.gradients.reads
        self.root.update({spec.name: tensors[spec.name] for spec in self.specs if not spec.is_parameter})
        aliases = {alias: name for alias, name in model.ALIASES.items() if name in self.root}  # if ALIASES
        self.root.update({alias: self.root[name] for alias, name in aliases.items()})  # if ALIASES
        self.steps, self.seed = 0, seed
        runs = {stage: model.STAGES[stage].run for stage in stages}
        self.runs = {s: torch.compile(run, backend=compiler) if compiler else run for s, run in runs.items()}
        self.pipeline = Pipeline(mesh, {stage: partial(self._forward, stage) for stage in stages}, model.VALUES)

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer updates: this rank's parts; something empty where all of them are frozen."""
        return list(self.gradients.optimised.values()) or [nn.Parameter(torch.empty(0))]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same under the model's own names."""
        return dict(self.gradients.optimised)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Forward and backward of a whole global batch of GLOBAL_BATCH samples; every rank passes all of it and takes
        its rows. Gradients add to those there are, as in torch. Returns the loss on every rank."""
        earlier = [(parameter, parameter.grad) for parameter in self.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        samples = model.MICRO_BATCH_SIZE
        first = self.mesh.data_rank * model.MICRO_BATCHES * samples  # if NOCONTEXT
        # Neighbours on the context axis take the same rows, and their own positions of them.  # if CONTEXT
        first = self.mesh.data_rank // model.CONTEXT * model.MICRO_BATCHES * samples  # if CONTEXT
        rows = [slice(first + m * samples, first + (m + 1) * samples) for m in range(model.MICRO_BATCHES)]
        batched = {name: spec.batched for name, spec in model.INPUTS.items()}
        batches = [{n: (batch[n][r] if split else batch[n]).to(DEVICE) for n, split in batched.items()} for r in rows]
        # What each mean of the loss divides by: its weight over all micro-batches and data ranks.  # if WEIGHED
        counts = [[weight.double() for weight in model.loss_weights(each)] for each in batches]  # if WEIGHED
        totals = torch.stack([torch.stack(weights) for weights in counts]).sum(0)  # if WEIGHED
        if self.mesh.data is not None:  # if WEIGHED
            dist.all_reduce(totals, group=self.mesh.data)  # if WEIGHED
        totals = totals / model.CONTEXT  # whose ranks counted the same, whole samples  # if CONTEXT  # if WEIGHED
        for each in batches:  # if WEIGHED
            each |= {f"loss_total_{k}": total.to(model.LOSS_TOTALS[k]) for k, total in enumerate(totals)}  # if WEIGHED
        self.gradients.begin_step()
        actions = model.actions(self.mesh.pipeline_rank)
        loss = self.pipeline.run(actions, [(samples, each) for each in batches], self.gradients.before_backward)
        self.gradients.finish_step()
        parallel.sum_tied(self.mesh, self.gradients.optimised, model.TIED)  # if TIED
        for spec in self.specs:  # if SUMMED
            if spec.summed and (part := self.gradients.optimised[spec.name].grad) is not None:  # if SUMMED
                dist.all_reduce(part, group=parallel.TENSOR_AXIS.group)  # a summand on every tensor rank  # if SUMMED
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.steps += 1
        # The last stage's rank has the contributions of its data rank, alike on its tensor ranks.
        if self.mesh.tensor_rank or self.mesh.pipeline_rank < model.PIPELINE - 1:
            loss.zero_()
        dist.all_reduce(loss)
        return float(loss)

    def _forward(self, stage: int, micro_batch: int, batch: Mapping[str, Tensor], *received: Tensor) -> Any:
        # One stream of random numbers a step, micro-batch, stage and data rank; tensor ranks draw alike.  # if RANDOM
        replica = self.mesh.data_rank  # if RANDOM  # if NOCONTEXT
        replica = self.mesh.data_rank // model.CONTEXT  # if RANDOM  # if CONTEXT
        place = (self.steps * model.MICRO_BATCHES + micro_batch) * model.DATA + replica  # if RANDOM
        torch.manual_seed(self.seed + place * len(model.STAGES) + stage)  # if RANDOM
        return self.runs[stage](Parameters(self.root), batch, *model.STAGES[stage].layers, *received)

    def save(self, directory: str | Path) -> None:
        """Whole tensors under the model's own names, one file a pipeline rank; readable under any split."""
        parallel.save(self.mesh, self.specs, self.gradients.whole, directory)


def _random(specs: list[Spec], seed: int) -> dict[str, Tensor]:
    """The same numbers whatever the split: ones for scales, zeros for biases, normal(0, 0.02) for the rest; buffers
    have their own values in buffers.pt."""
    file = Path(__file__).with_name("buffers.pt")
    tensors: dict[str, Tensor] = torch.load(file, map_location=DEVICE, weights_only=True) if file.exists() else {}
    for spec in (spec for spec in specs if spec.is_parameter):
        generator = torch.Generator().manual_seed(seed + sum(spec.name.encode()) * 7919 + len(spec.name))
        whole = torch.empty(spec.shape).normal_(0.0, 0.02, generator=generator)
        if len(spec.shape) < 2:
            whole.fill_(0.0 if spec.name.endswith("bias") else 1.0)
        tensors[spec.name] = parallel.part(whole.to(spec.dtype), spec)
    return tensors

"""What one rank has of a program: its groups, stages, parameters and interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from autoplan import schedules
from autoplan.capture import Capture, gather_inputs
from autoplan.errors import StrategyError
from autoplan.passes.compile_pieces import compile_pieces
from autoplan.passes.evaluation import evaluation
from autoplan.passes.split_stages import StageGraph
from autoplan.plan import Plan
from autoplan.runtime.batch import (
    batch_rows,
    even_sizes,
    micro_batch_sizes,
    part,
    rows_of_rank,
    to_device,
    uneven_rows,
)
from autoplan.runtime.build import (
    Builder,
    RankGraphs,
    install,
    is_gathered,
    local_parameters,
    on_device,
    proven_actions,
    proven_forwards,
)
from autoplan.runtime.collectives import AxisCommunicator, Channels, Mesh
from autoplan.runtime.data_parallel import GradientSync, norm_terms
from autoplan.runtime.experts import apart
from autoplan.runtime.faults import RankFault, action_fault
from autoplan.runtime.interpreter import Chunk, MicroBatch, RankInterpreter
from autoplan.runtime.launch import compile_timeout, group_timeout, wait_longer
from autoplan.runtime.masters import keeps_masters
from autoplan.runtime.progress import WATCH
from autoplan.runtime.randomness import Randomness
from autoplan.runtime.state import FullTensors
from autoplan.runtime.waits import WAITS
from autoplan.sharding.placements import Copied, Placement, Shard


class RankPart:
    """What one rank has of a program: its groups, stages, parameters and interpreter."""

    def __init__(self, capture: Capture, plan: Plan, builder: Builder, device: torch.device) -> None:
        self._capture, self._strategy, self._device = capture, plan.strategy, device
        self._masters, self._compiled = keeps_masters(plan.precision), plan.compiled
        ownership = builder.ownership()
        stages = builder.graphs(0).stages
        timeout = compile_timeout(device.type) if plan.compiled else group_timeout(device.type)
        self.mesh = Mesh(
            plan.strategy,
            edges=[(value.source, target) for s in stages for value in s.sends for target in value.destinations],
            tied=ownership.tied.values(),
            device=device,
            timeout=timeout,
        )
        if self.mesh.world > 1:
            WATCH.start(self.mesh.rank, timeout.total_seconds())
        if self.mesh.world > 1 and plan.compiled:
            wait_longer(timeout)
        self._ownership = ownership
        self._randomness = Randomness(self.mesh, stages)
        self.sync: GradientSync | None = None
        self.interpreter: RankInterpreter | None = None
        self._stages: list[StageGraph] = []
        self._evaluator: RankInterpreter | None = None  # made by the first evaluation
        self._weights: GraphModule | None = None
        self._placements: dict[str, Placement] = {}
        self.experts: frozenset[str] = frozenset()  # parameters of which this rank holds a run of experts
        self._totals: dict[str, torch.dtype] = {}
        self.samples = 0  # of the global batch of the latest step
        graphs = builder.graphs(self.mesh.at.tensor if self.mesh.at is not None else 0)
        buffers = self._place(graphs) if self.mesh.at is not None else {}
        self.state = FullTensors(
            capture,
            ownership,
            self.mesh,
            sync=self.sync,
            placements=graphs.placements,
            experts=graphs.experts,
            buffers=buffers,
            buffer_owner={
                name: schedules.rank_of_stage(s.index, ranks=plan.strategy.pipeline)
                for s in stages
                for name in s.mutated_buffers
            },
        )

    def _place(self, graphs: RankGraphs) -> dict[str, Tensor]:
        """Put this rank's stages together; returns their buffers by name."""
        mesh, strategy, device = self.mesh, self._strategy, self._device
        assert mesh.at is not None
        self._placements, self.experts = graphs.placements, graphs.experts
        parameters = local_parameters(
            self._capture,
            graphs,
            self._ownership,
            holder=mesh.at.pipeline,
            tensor_rank=mesh.at.tensor,
            degree=strategy.tensor,
            expert_rank=mesh.expert_index,
            expert_degree=strategy.expert,
            device=None if is_gathered(strategy) else device,
        )
        tied = {name: held for name, held in self._ownership.tied.items() if mesh.at.pipeline in held}
        summands = [name for name in parameters if isinstance(graphs.placements.get(name), Copied)]
        self.sync = apart(parameters, mesh, tied, tuple(summands), graphs.experts, masters=self._masters)
        own = schedules.stages_of_rank(
            mesh.at.pipeline, stages=len(graphs.stages), virtual_stages=strategy.virtual_stages
        )
        stages = [install(graphs.stages[index], self._ownership, self.sync.read, device) for index in own]
        self._stages = stages
        chunks = [Chunk(stage=self._to_run(stage), adds=self._adds(graphs, stage.index)) for stage in stages]
        self.sync.later = frozenset(name for chunk in chunks for name in chunk.adds.get("W", ()))
        values = [value for s in graphs.stages for value in s.sends]
        self.interpreter = RankInterpreter(
            chunks,
            rank=mesh.rank,
            device=device,
            channels=Channels(mesh, values) if strategy.pipeline > 1 else None,
            communicator=AxisCommunicator(mesh) if strategy.tensor * strategy.context * strategy.expert > 1 else None,
            around_forward=self._around_forward,
            before_backward=self.sync.before_backward,
        )
        batch_names = {spec.placeholder for spec in self._capture.inputs}
        for stage in stages:
            for node in stage.graph_module.graph.find_nodes(op="placeholder"):
                if node.name in stage.batch_inputs and node.name not in batch_names:
                    self._totals[node.name] = node.meta["val"].dtype
        if graphs.weights is not None and self._totals:
            self._weights = on_device(graphs.weights, device).to(device)
        return {name: stage.graph_module.get_buffer(name) for stage in stages for name in stage.buffers}

    def _to_run(self, stage: StageGraph) -> StageGraph:
        """The stage as its steps run it: compiled, where the plan was made so."""
        return dataclasses.replace(stage, graph_module=compile_pieces(stage.graph_module)) if self._compiled else stage

    def _adds(self, graphs: RankGraphs, stage: int) -> dict[str, frozenset[str]]:
        """To which parameters each kind of backward action of a stage adds gradients, by the user's names."""
        canonical = self._ownership.canonical
        return {kind: frozenset(canonical[name] for name in names) for kind, names in graphs.adds[stage].items()}

    # --------------------------------------------------------------------------------------------------------- one step

    def step(self, batch: Any, *, local: bool, step: int) -> float:
        """The loss of the global batch; see :meth:`Program.step`."""
        self.state.require_values()
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        with WATCH.main.during("gradient synchronisation", step=step):
            return self._step(loss, self._micro_batches(batch, local=local), step)

    @torch.no_grad()
    def evaluate(self, batch: Any, *, step: int) -> float:
        """The loss of the global batch after ``eval()``; see :meth:`Program.evaluate`."""
        self.state.require_values()
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        micro_batches = self._to_evaluate(batch)
        if self.interpreter is not None and self.sync is not None and self.mesh.at is not None:
            if self._evaluator is None:
                stages = [evaluation(stage) for stage in self._stages]
                around = self.sync.around_forward
                self._evaluator = self.interpreter.of_forwards(stages, lambda stage, micro_batch: around())
            strategy = self._strategy
            lists = proven_forwards(strategy.pipeline, strategy.virtual_stages, len(micro_batches))
            with WATCH.main.during("forward", step=step):
                self.sync.refresh()
                contribution = self._evaluator.run(
                    lists[self.mesh.at.pipeline], self._with_totals(micro_batches), step=step
                )
            if self.mesh.at.tensor == 0:  # the others hold the same loss
                loss = contribution
        return float(self.mesh.sum_over_world(loss).item())

    def _to_evaluate(self, batch: Any) -> list[MicroBatch]:
        """This rank's part of a global batch of any size from one sample a data rank on."""
        tensors = self._tensors(batch)
        total = batch_rows(self._capture, tensors)
        index = self.mesh.data_index if self.mesh.at is not None else 0
        if self._fixed_size is not None:
            rows = rows_of_rank(total, self._strategy, index)
            return self._cut(tensors, rows.start, micro_batch_sizes(len(rows), self._strategy, fixed=self._fixed_size))
        rows, count = uneven_rows(total, self._strategy, index)
        return self._cut(tensors, rows.start, even_sizes(len(rows), count))

    def _step(self, loss: Tensor, micro_batches: list[MicroBatch], step: int) -> float:
        self._randomness.begin_step()
        arriving: dist.Work | None = None
        if self.interpreter is not None and self.sync is not None and self.mesh.at is not None:
            try:
                self.sync.begin_step()
                micro_batches = self._with_totals(micro_batches)
                contribution = self.interpreter.run(self._actions(len(micro_batches)), micro_batches, step=step)
                WATCH.main.mark("gradient synchronisation", stage=self.mesh.at.pipeline)
                if self.mesh.at.tensor == 0 or self.mesh.all_alike:  # the others hold the same loss
                    loss = contribution
                # The losses are on their way while gradients arrive; behind the last of these, in one order everywhere.
                self.sync.send_rest()
                if not self.mesh.all_alike:
                    arriving = self.mesh.begin_sum_over_world(loss)
                self.sync.finish_step()
            except RankFault:
                raise
            except Exception as error:
                raise action_fault(
                    error,
                    rank=self.mesh.rank,
                    step=step,
                    stage=self.mesh.at.pipeline,
                    micro_batch=None,
                    action="gradient synchronisation",
                ) from error
        else:
            arriving = self.mesh.begin_sum_over_world(loss)
        if arriving is not None:
            with WAITS.during("loss"):
                arriving.wait()
        return float(loss.item())

    def _actions(self, micro_batches: int) -> schedules.Actions:
        """This rank's list, from lists that are proven to end."""
        assert self.mesh.at is not None
        strategy = self._strategy
        return proven_actions(strategy.schedule, strategy.pipeline, strategy.virtual_stages, micro_batches)[
            self.mesh.at.pipeline
        ]

    @contextmanager
    def _around_forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        assert self.sync is not None
        with self.sync.around_forward(), self._randomness.around_forward(stage, micro_batch):
            yield

    def _tensors(self, batch: Any) -> dict[str, Tensor]:
        """The user's batch, by placeholder."""
        given = gather_inputs(self._capture, batch)
        return {spec.placeholder: tensor for spec, tensor in zip(self._capture.inputs, given, strict=True)}

    def _micro_batches(self, batch: Any, *, local: bool) -> list[MicroBatch]:
        tensors = self._tensors(batch)
        total = batch_rows(self._capture, tensors)
        self.samples = total * (self._strategy.data if local else 1)
        rows = range(total)
        if local:
            self._require_equal_parts(total)
        else:
            rows = rows_of_rank(total, self._strategy, self.mesh.data_index if self.mesh.at is not None else 0)
        sizes = micro_batch_sizes(len(rows), self._strategy, fixed=self._fixed_size)
        return self._cut(tensors, rows.start, sizes)

    @property
    def _fixed_size(self) -> int | None:
        return None if self._capture.dynamic_batch else self._capture.batch_size

    def _cut(self, tensors: Mapping[str, Tensor], start: int, sizes: Sequence[int]) -> list[MicroBatch]:
        """This rank's micro-batches, from row ``start``; none where the plan does not use it."""
        if self.mesh.at is None:
            return []
        made = []
        for size in sizes:
            mine = part(self._capture.inputs, tensors, range(start, start + size))
            made.append(MicroBatch(samples=size, inputs=to_device(mine, self._device)))
            start += size
        return made

    def _require_equal_parts(self, rows: int) -> None:
        """Data ranks must synchronise equally often, so their own batches must be equally large."""
        sizes = torch.tensor([rows, -rows], dtype=torch.int64, device=self._device)
        if self.mesh.at is None:
            sizes = torch.full_like(sizes, -(2**62))
        largest, smallest = self.mesh.max_over_world(sizes).tolist()
        if largest != -smallest:
            raise StrategyError(
                f"the ranks' own batches have {-smallest} to {largest} samples",
                where="batch",
                legal="equally many on every rank with local=True",
                attempt="drop_last=True of a DistributedSampler or DataLoader, or pass the whole global batch",
            )

    def _with_totals(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add what each loss term's mean divides by: its weight summed over micro-batches and data ranks. Ranks of one
        context group count the same, whole samples."""
        if self._weights is None:
            return micro_batches
        names = [spec.placeholder for spec in self._capture.inputs]
        with torch.no_grad():
            parts = [self._weights(*(m.inputs[name] for name in names)) for m in micro_batches]
        weights = torch.stack([torch.stack([w.double() for w in weights]) for weights in parts]).sum(0)
        totals = self.mesh.sum_over_data(weights) / self._strategy.context
        by_name = {f"loss_total_{index}": total for index, total in enumerate(totals)}
        chosen = {name: by_name[name].to(dtype) for name, dtype in self._totals.items()}
        return [MicroBatch(samples=m.samples, inputs={**m.inputs, **chosen}) for m in micro_batches]

    def gradient_norm(self, norm_type: float) -> Tensor:
        """The norm of the whole gradient, 0-dim float64, alike on every rank."""
        terms = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.sync is not None:
            terms = norm_terms(self.sync, filter(self._counts, self.sync.parameters), norm_type)
        if norm_type == float("inf"):
            return self.mesh.max_over_world(terms)
        return self.mesh.sum_over_world(terms) ** (1.0 / norm_type)

    def _counts(self, name: str) -> bool:
        """Whether this rank's copy (or part) of the gradient counts in the norm: once a tied group, a tensor axis, a
        data axis."""
        at = self.mesh.at
        assert at is not None and self.sync is not None
        whole = not isinstance(self._placements.get(name), Shard)
        first = self._ownership.holders[name][0] == at.pipeline
        return first and (not whole or at.tensor == 0) and self.sync.counts_here(name)

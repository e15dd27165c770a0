"""The published dense runs as planning questions: what the search would choose on the same model, machines and batch.

    python -m tests.regression.published    # prints the table of data/published_plans.txt; two minutes

A question is one model on one cluster at one global batch, with the runs that were published of it. The model's layers
are those of :mod:`tests.regression.transformer`; both the search's plan and the published configuration are priced by
the search's own costs (our runtime's software, not the source's), so that the two can be compared.

The published configuration is priced as it was split: blocks as even as they go, recompute on the blocks alone. What
the space of the search cannot express is named (:attr:`Priced.beside`): recompute that is not stated, or of every
second product, is what the memory asks for, and chunks that do not fit by our memory model are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.layers.types import Edge, Layer, LayerGraph, LayerKind
from autoplan.plan import Strategy
from autoplan.search.choice import SHARDING_TOLERANCE
from autoplan.search.engine import TOLERANCE, Engine
from autoplan.search.evaluate import Evaluation, evaluate_decision, evaluate_stages
from autoplan.search.infeasible import infeasible
from autoplan.search.listed import even_cuts, rank_memories
from autoplan.search.problem import RECOMPUTE_POLICIES, Problem
from autoplan.search.space import Space, open_space
from tests.regression.peaks import loss_of, with_loss
from tests.regression.runs import Run, read_rows, read_runs, split_stages
from tests.regression.transformer import HALF, Shape, block, embedding, head


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``runs``: every configuration that was published of this model, cluster and batch."""

    source: str
    name: str
    problem: Problem
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A published configuration under the search's costs."""

    run: Run
    evaluation: Evaluation
    short_bytes: float
    beside: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return self.evaluation.step_s

    @property
    def fits(self) -> bool:
        return self.short_bytes <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the search chooses, and its fastest candidate's step, beside the published configurations (the one of least
    predicted time first)."""

    question: Question
    chosen: Evaluation
    fastest_s: float
    published: tuple[Priced, ...]

    @property
    def best(self) -> Priced:
        """The fastest published configuration that fits by the memory model, else the fastest."""
        return next((priced for priced in self.published if priced.fits), self.published[0])

    @property
    def compromise(self) -> float:
        """By how much the plan may be slower than the fastest, for less parallelism or for whole state."""
        return max(TOLERANCE, SHARDING_TOLERANCE if self.chosen.strategy.zero_stage == 0 else 0.0)


def questions() -> list[Question]:
    """One for each model, cluster and batch of ``measurements.csv``."""
    rows = {row["id"]: row for row in read_rows("measurements")}
    found: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in read_runs():
        if run.id in rows:
            found[(run.source, run.cluster.spec, run.cluster.inter, _whole(run.shape), _batch(run))].append(run)
    return [
        Question(
            source=runs[0].source, name=_name(rows[runs[0].id], runs[0]), problem=_problem(runs[0]), runs=tuple(runs)
        )
        for runs in found.values()
    ]


def _batch(run: Run) -> int:
    return run.strategy.global_batch


def _whole(shape: Shape) -> Shape:
    """The model before any split."""
    return dataclasses.replace(shape, tensor=1, sequence_parallel=False, vocab=0)


def _name(row: dict[str, str], run: Run) -> str:
    return f"{row['model']}, {run.shape.seq} tokens, {run.cluster.spec}, batch {_batch(run)}"


def _problem(run: Run) -> Problem:
    shape = dataclasses.replace(run.shape, tensor=1, sequence_parallel=False)
    return planning_problem(shape, run.cluster, global_batch=_batch(run), loss=_loss(run))


def planning_problem(shape: Shape, cluster: Cluster, *, global_batch: int, loss: str = "compiled") -> Problem:
    """How to train the model of ``shape`` on ``cluster``; ``loss`` is a key of ``peaks.LOSSES``."""

    def tensor_kinds(degree: int) -> tuple[LayerKind, ...]:
        if shape.heads % degree or shape.kv_heads % degree or shape.ffn % degree:
            raise StrategyError(f"{shape.kv_heads} key-value heads are not divisible by tensor {degree}")
        return _kinds(dataclasses.replace(shape, tensor=degree), loss)

    def sequence_kinds(degree: int) -> tuple[LayerKind, ...]:
        tensor_kinds(degree)  # raises for degrees that are none
        return _kinds(dataclasses.replace(shape, tensor=degree, sequence_parallel=True), loss)

    return Problem(
        layers=_layers(shape, loss),
        tensor_kinds=tensor_kinds,
        sequence_kinds=sequence_kinds,
        sequence_edges=lambda degree: _edges(shape, HALF * shape.seq * shape.hidden / degree),
        cluster=cluster,
        global_batch=global_batch,
        precision=shape.dtype,
    )


def _loss(run: Run) -> str:
    """What the loss keeps of the logits, a key of ``peaks.LOSSES``. llm_foundry's, from flash-attn, reads the 16-bit
    logits and keeps nothing in fp32, as torchtitan's compiled one."""
    if run.source == "torchtitan":
        return loss_of(run)
    return "compiled" if run.source == "llm_foundry" else "megatron"


def _kinds(shape: Shape, loss: str) -> tuple[LayerKind, ...]:
    return embedding(shape), block(shape), with_loss(head(shape), loss)


def _layers(shape: Shape, loss: str) -> LayerGraph:
    names = ["embedding", *(f"blocks.{i}" for i in range(shape.layers)), "head"]
    kinds = [0, *[1] * shape.layers, 2]
    return LayerGraph(
        name=f"{shape.layers}x{shape.hidden}",
        layers=tuple(Layer(name=name, kind=kind, nodes=()) for name, kind in zip(names, kinds, strict=True)),
        kinds=_kinds(shape, loss),
        edges=_edges(shape, HALF * shape.seq * shape.hidden),
        tokens_per_sample=shape.seq,
        dtype=shape.dtype,
        fingerprint=f"{shape}",
    )


def _edges(shape: Shape, row: float) -> tuple[Edge, ...]:
    """``row`` bytes a sample from each layer to the next."""
    return tuple(Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=row) for i in range(shape.layers + 1))


def answer(question: Question) -> Answer:
    """Search, and price what was published. Raises :class:`InfeasibleError` where nothing fits."""
    space = open_space(question.problem)
    engine = Engine(space=space, solver=None)
    found = engine.run()
    if found is None:
        raise infeasible(engine)
    chosen, fastest = (
        evaluate_decision(engine.space, decision.strategy, decision.cuts) for decision in (found.chosen, found.fastest)
    )
    return Answer(
        question=question,
        chosen=chosen,
        fastest_s=fastest.step_s,
        published=tuple(sorted((price(space, run) for run in question.runs), key=lambda priced: priced.step_s)),
    )


def price(space: Space, run: Run) -> Priced:
    """``run`` under the costs of the search."""
    space, strategy = expressible(space, run)
    beside: tuple[str, ...] = ()
    if run.virtual > 1:
        interleaved = _interleaved(space, run, strategy)
        if interleaved is not None:
            return _priced(space, run, interleaved, beside)
        beside = (*beside, f"without its {run.virtual} chunks")
    cuts = tuple(itertools.accumulate((len(kinds) for kinds in split_stages(run)), initial=0))
    if run.recompute not in RECOMPUTE_POLICIES:
        beside = (*beside, f"recompute {run.recompute or 'not stated'}, so as memory asks")
        return _priced(space, run, evaluate_decision(space, strategy, cuts), beside)
    policies = [_policies(run, first, end) for first, end in itertools.pairwise(cuts)]
    tables = space.tables(strategy).of_split(cuts)
    return _priced(space, run, evaluate_stages(tables, space, cuts, policies), beside)


def _priced(space: Space, run: Run, evaluation: Evaluation, beside: tuple[str, ...]) -> Priced:
    short_bytes = evaluation.peak_bytes - space.problem.usable_bytes
    return Priced(run=run, evaluation=evaluation, short_bytes=short_bytes, beside=beside)


def _interleaved(space: Space, run: Run, strategy: Strategy) -> Evaluation | None:
    """The run with its chunks, as even as they go, under its recompute; None where a GPU can't hold that."""
    chunked = dataclasses.replace(strategy, schedule="interleaved", virtual_stages=run.virtual)
    if run.recompute in RECOMPUTE_POLICIES:
        forced = {**space.problem.forced, "recompute": run.recompute}
        space = open_space(dataclasses.replace(space.problem, forced=forced))
    cuts = even_cuts(space, chunked)
    if cuts is None or rank_memories(space, chunked, cuts) is None:
        return None
    return evaluate_decision(space, chunked, cuts)


def expressible(space: Space, run: Run) -> tuple[Space, Strategy]:
    """The strategy of ``run`` with one stage a GPU, and the space that prices it."""
    strategy = run.strategy
    if strategy.data == 1 and strategy.zero_stage:
        strategy = dataclasses.replace(strategy, zero_stage=0)
    if strategy.tensor == 1 or not strategy.sequence_parallel:
        return space, dataclasses.replace(strategy, sequence_parallel=False)
    return open_space(dataclasses.replace(space.problem, forced={"sequence_parallel": True})), strategy


def _policies(run: Run, first: int, end: int) -> tuple[str, ...]:
    return tuple(run.recompute if 0 < layer <= run.shape.layers else "none" for layer in range(first, end))


def differences(answered: Answer) -> str:
    """In which keys the plan differs from the fastest published configuration, as ``ours (theirs)``."""
    ours, theirs, run = answered.chosen.strategy, answered.best.evaluation.strategy, answered.best.run
    parts = [
        f"{short} {getattr(ours, key)} ({getattr(theirs, key)})"
        for key, short in _KEYS.items()
        if getattr(ours, key) != getattr(theirs, key)
    ]
    used = _recompute(answered.chosen)
    if run.recompute and used != run.recompute:
        parts.append(f"recompute {used} ({run.recompute})")
    return ", ".join(parts) or "the same"


_KEYS = {
    "data": "data",
    "tensor": "tensor",
    "pipeline": "pipeline",
    "schedule": "schedule",
    "virtual_stages": "chunks",
    "zero_stage": "ZeRO",
    "micro_batch_size": "mb",
    "sequence_parallel": "sequence parallel",
}


def _recompute(evaluation: Evaluation) -> str:
    """Policies, most layers first; a policy of every block stands alone."""
    used = Counter(policy for stage in evaluation.stages for policy in stage.policies)
    blocks = used.total() - 2
    shown = [(policy, number) for policy, number in used.most_common() if policy != "none"]
    return " + ".join(p if n >= blocks else f"{p} {n}/{blocks}" for p, n in shown) or "none"


def table(answers: Iterable[Answer]) -> str:
    """One row a model and cluster; all seconds but the measured are predictions by the search's own costs."""
    lines = [
        f"{'plan':>9}{'fastest':>10}{'published':>11}{'measured':>10}  model and cluster: what the plan does otherwise "
        "(published)"
    ]
    for answered in answers:
        best, notes = answered.best, list(answered.best.beside)
        if not best.fits:
            notes.append(f"{best.short_bytes / 2**30:.1f} GiB over a GPU's memory by our model")
        lines.append(
            f"{answered.chosen.step_s:>8.3f}s{answered.fastest_s:>9.3f}s{best.step_s:>10.3f}s"
            f"{best.run.step_time_s:>9.3f}s  {answered.question.source} {answered.question.name}: "
            f"{differences(answered)}" + (f" [published: {'; '.join(notes)}]" if notes else "")
        )
    return "\n".join(lines)


def whole_table() -> str:
    """Every question, those for which nothing fits by our memory model last."""
    answers, without = [], []
    for question in questions():
        try:
            answers.append(answer(question))
        except InfeasibleError as error:
            without.append(f"nothing fits: {question.source} {question.name}: {error.what}")
    return "\n".join((table(answers), *without)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(whole_table())

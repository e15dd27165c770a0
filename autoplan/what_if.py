"""A plan's question asked again: of its operators, and of what would change the decision.

A plan file holds the answer and not the model. Where a deeper question is asked, the model is traced again, and must be
the one that the plan was made for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autoplan import progress
from autoplan.cluster import Cluster
from autoplan.consistency import not_its_cluster, other_cluster, other_model
from autoplan.errors import AutoplanError, ClusterError, InfeasibleError, PlanFileError
from autoplan.explain.text import size
from autoplan.plan import OtherAnswer, Plan
from autoplan.request import AskedModel, Gpus, Traced, Wish, cluster_of, problem_of

if TYPE_CHECKING:
    from autoplan.search import Problem

GIB = 2.0**30
# Memory beyond what there is, as shares of it, until the decision changes; then the least whole GiB that changes it.
_MORE, _LESS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.75, 0.5, 0.25)
_LINKS = (2, 4, 8)
_HALVINGS = 4

Answer = Plan | None
Asked = Callable[[Cluster], "Problem"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan answers: the traced model on its cluster."""

    traced: Traced
    cluster: Cluster
    problem: Problem


def question(plan: Plan, *, model: str | None = None, gpus: Gpus = None) -> Question:
    """The question that ``plan`` answers. ``model`` and ``gpus``: where they are not what the plan calls them.

    Raises :class:`PlanFileError` where the model or the cluster is another, and says what differs.
    """
    cluster = _cluster(plan, gpus)
    named = model or plan.model.name
    refused: AutoplanError | None = None
    another: AutoplanError | None = None
    for seq, precision in _as_asked(plan):
        try:
            traced = AskedModel(named, None, None, plan.global_batch, seq, precision).trace(cluster)
        except AutoplanError as error:
            refused = refused or _named(error, model)
            continue
        unlike = other_model(plan, traced.layers)
        if not unlike:
            problem = problem_of(traced, cluster, Wish(plan.forced, plan.optimizer, compiled=plan.compiled))
            return Question(traced=traced, cluster=cluster, problem=problem)
        another = another or PlanFileError(
            f"the plan was made for {plan.model.name}, and {named} is another model: {unlike}",
            attempt="name the model of the plan with --model",
        )
    raise another or refused or PlanFileError("the plan names no model")


def _as_asked(plan: Plan) -> list[tuple[int | None, str | None]]:
    """(tokens, precision) as they may have been asked for, which is not in the plan: as they came out, or nothing; what
    it says were assumed first, since a trace of a wrong guess costs as much as the right one."""
    said = [text for text in plan.assumptions if text.endswith("(none was given)")]
    tokens: list[int | None] = [plan.model.tokens_per_sample, None]
    precisions: list[str | None] = [plan.precision, None]
    if any(text.startswith("sequence length") for text in said):
        tokens.reverse()
    if any(text.startswith("precision") for text in said):
        precisions.reverse()
    return [(seq, precision) for precision in precisions for seq in tokens]


def _named(error: AutoplanError, model: str | None) -> AutoplanError:
    if model is not None:
        return error
    return PlanFileError(
        f"the model is needed again, and its name in the plan is none that can be built: {error.what}",
        legal="a preset, a Hugging Face config.json, or file.py:factory",
        attempt="--model MODEL, as it was given to `autoplan plan`",
    )


def _cluster(plan: Plan, gpus: Gpus) -> Cluster:
    try:
        cluster = cluster_of(gpus or plan.cluster.spec, None)
    except ClusterError as error:
        if gpus is not None:
            raise
        raise ClusterError(
            f"the plan's cluster is needed again, and is not found: {error.what}",
            where=plan.cluster.spec,
            attempt="--gpus SPEC, as it was given to `autoplan plan`",
        ) from None
    if unlike := other_cluster(plan, cluster):
        usual = "--gpus SPEC, as it was given to `autoplan plan`; or plan again for this cluster"
        changed = f"plan again: {plan.cluster.spec} is not what it was when the plan was made"
        raise not_its_cluster(plan, cluster, unlike, attempt=changed if gpus is None else usual)
    return cluster


def what_if(plan: Plan, *, model: str | None = None, gpus: Gpus = None) -> Plan:
    """``plan`` with its ``other_answers``: the nearest memory and link speeds at which another decision is best, or how
    far they may go without one. Each is a search: some tens in all. Raises as :func:`question`."""
    asked = question(plan, model=model, gpus=gpus)
    return dataclasses.replace(plan, other_answers=tuple(_answers(plan, asked)))


def _answers(plan: Plan, asked: Question) -> Iterator[OtherAnswer]:
    cluster, strategy, traced = asked.cluster, plan.strategy, asked.traced
    memory = cluster.device.memory_bytes

    def with_memory(value: float) -> Problem:  # what tensor parallelism costs does not hang on memory
        return dataclasses.replace(asked.problem, cluster=cluster.with_more_memory(value - memory))

    def with_links(intra: float, inter: float) -> Problem:
        wish = Wish(plan.forced, plan.optimizer, compiled=plan.compiled)
        return problem_of(traced, cluster.with_links(intra=intra, inter=inter), wish)

    short = [memory + a.short_by_bytes for a in plan.alternatives if a.step_time_s is None]
    more = sorted({*(memory * (1 + share) for share in _MORE), *(v for v in short if v <= 8 * memory)})
    ways: list[tuple[str, str, list[float], Callable[[float], Problem]]] = [
        ("memory_bytes", "more memory", more, with_memory),
        ("memory_bytes", "less memory", [memory * share for share in _LESS], with_memory),
    ]
    links = []
    if cluster.nodes > 1:
        links.append(("inter_bytes_per_s", "links between nodes", lambda f: with_links(1.0, f)))
    if cluster.gpus_per_node > 1 and strategy.gpus > 1:
        links.append(("intra_bytes_per_s", "links inside a node", lambda f: with_links(f, 1.0)))
    for quantity, name, problem_at in links:
        ways.append((quantity, f"faster {name}", [float(f) for f in _LINKS], problem_at))
        ways.append((quantity, f"slower {name}", [1.0 / f for f in _LINKS], problem_at))
    for number, (quantity, what, values, problem_at) in enumerate(ways):
        said = _Progress(number, len(ways), f"searching with {what}", len(values))
        value, answer = _first_change(plan, values, problem_at, said)
        changed = _decision(answer) != _decision(plan)
        if quantity == "memory_bytes" and changed:
            value, answer = _nearest(plan, memory, value, answer, with_memory)
        yield _told(cluster, quantity, value, answer, changed=changed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Progress:
    """The share that is done before the ``step``-th search of ``steps`` of the ``number``-th way of ``ways``."""

    number: int
    ways: int
    what: str
    steps: int

    def at(self, step: int) -> None:
        progress.at((self.number + step / (self.steps + 1)) / self.ways, self.what)


def _first_change(
    plan: Plan, values: list[float], problem_at: Callable[[float], Problem], said: _Progress
) -> tuple[float, Answer]:
    """The first of ``values`` at which the decision is another, or the last, and its answer."""
    for step, value in enumerate(values):
        said.at(step)
        answer = _search(problem_at(value))
        if _decision(answer) != _decision(plan):
            return value, answer
    return value, answer


def _nearest(
    plan: Plan, here: float, there: float, answer: Answer, problem_at: Callable[[float], Problem]
) -> tuple[float, Answer]:
    """From ``there``, where ``answer`` is another decision, towards ``here`` in whole GiB while it stays one."""
    change, most = 0, round(abs(there - here) / GIB)
    sign = 1 if there > here else -1
    for _ in range(_HALVINGS):
        middle = (change + most) // 2
        if middle in (change, most):
            break
        found = _search(problem_at(here + sign * middle * GIB))
        if _decision(found) != _decision(plan):
            most, there, answer = middle, here + sign * middle * GIB, found
        else:
            change = middle
    return there, answer


def _search(problem: Problem) -> Answer:
    from autoplan.search import search

    try:
        return search(problem)
    except InfeasibleError:
        return None


def _decision(answer: Answer) -> str:
    """What counts as another decision: the degrees and what is sharded, and not the size of micro-batches or the
    schedule."""
    return "" if answer is None else answer.strategy.describe()


def _told(cluster: Cluster, quantity: str, value: float, answer: Answer, *, changed: bool) -> OtherAnswer:
    if quantity == "memory_bytes":
        here = cluster.device.memory_bytes
        condition = f"{size(abs(value - here))} {'more' if value > here else 'less'} on each GPU"
        condition = condition if changed else f"up to {condition}"
    else:
        link = cluster.inter if quantity == "inter_bytes_per_s" else cluster.intra
        where = "between nodes" if quantity == "inter_bytes_per_s" else "inside a node"
        times = f"{value:g} times" if value > 1 else f"1/{1 / value:g} of"
        way = "" if changed else "up to " if value > 1 else "down to "
        if cluster.groups:  # which have links of their own
            fast = f"{value:g} times" if value > 1 else f"1/{1 / value:g}"
            where += " and between kinds" if quantity == "inter_bytes_per_s" else ""
            condition = f"links {where} {way}{fast} as fast"
        value = value * link.bytes_per_s
        if not cluster.groups:
            condition = f"{way}{value / 1e9:g} GB/s a GPU {where} ({times} what it is)"
    return OtherAnswer(
        condition=condition,
        quantity=quantity,
        value=value,
        strategy=None if answer is None else answer.strategy,
        step_time_s=None if answer is None else answer.predicted.step_time_s,
    )

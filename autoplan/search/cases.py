"""Which case of the advice a plan is, in one sentence, from what the families showed."""

from __future__ import annotations

from autoplan.plan import Strategy
from autoplan.search.constraints import asked
from autoplan.search.evaluate import Evaluation
from autoplan.search.families import FamilyBest, gib
from autoplan.search.problem import Problem


def case(problem: Problem, evaluation: Evaluation, families: tuple[FamilyBest, ...]) -> str:
    """One sentence: does the model fit one card, does each layer, and what follows."""
    by_name = {family.family: family for family in families}
    sentence = _why(problem, evaluation, by_name)
    unused = problem.cluster.gpus - evaluation.strategy.gpus
    if unused:
        limited = problem.max_gpus is not None and problem.max_gpus < problem.cluster.gpus
        reason = "as forced" if problem.forced or limited else "more would not be faster"
        verb = "stays" if unused == 1 else "stay"
        sentence += f"; {unused} of the {problem.cluster.gpus} GPUs {verb} unused, {reason}"
    return sentence + "."


def _why(problem: Problem, evaluation: Evaluation, by_name: dict[str, FamilyBest]) -> str:
    strategy = evaluation.strategy
    if problem.forced:
        forced = ", ".join(f"{key} {value}" for key, value in asked(problem).items())
        return f"Forced: {forced}; the rest is planned: {strategy.describe()}"
    one = by_name.get("one GPU")
    memory = gib(problem.cluster.device.memory_bytes)
    alone = evaluation if strategy.gpus == 1 else one.evaluation if one is not None else None
    if alone is not None:
        return f"The model fits one card of {memory}, {_fits_one(strategy)}"
    short = f"{gib(one.shortfall.short_bytes)} short" if one is not None and one.shortfall else "too large"
    if strategy.tensor > 1 and _needs_tensor(by_name):
        return (
            f"The model does not fit one card ({short}), and no split by layers or sharded state fits, so matrices are "
            f"split: {strategy.describe()}"
        )
    splits = _layer_splits(strategy)
    return f"The model does not fit one card ({short}), so {splits}: {strategy.describe()}"


def _fits_one(strategy: Strategy) -> str:
    if strategy.gpus == 1:
        return "and more GPUs would not be faster: nothing is split"
    if strategy.axes == ("data",):
        return f"so only the batch is split: {strategy.describe()}"
    if strategy.axes == ("data", "zero"):
        return f"so only the batch is split, and sharing the optimizer's work is faster: {strategy.describe()}"
    return f"but the batch alone is split too slowly, so more is: {strategy.describe()}"


def _needs_tensor(by_name: dict[str, FamilyBest]) -> bool:
    """No family without the tensor axis fits."""
    without = [family for name, family in by_name.items() if "tensor" not in name]
    return all(family.evaluation is None for family in without)


def _layer_splits(strategy: Strategy) -> str:
    parts = []
    if strategy.pipeline > 1:
        parts.append("its layers are split into stages")
    if strategy.zero_stage and strategy.data > 1:
        parts.append("its state is sharded over the data axis")
    if strategy.tensor > 1:
        parts.append("its matrices are split")
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else "it is split"

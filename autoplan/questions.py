"""``autoplan.fit``, ``autoplan.min_gpus`` and ``autoplan.compare``: capture -> layers -> one question to the search.

Arguments are those of :func:`autoplan.plan`; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoplan.request import SAMPLES_A_GPU, AskedModel, Gpus, Wish, cluster_of

if TYPE_CHECKING:
    from torch import nn

    from autoplan.search.questions import Contender, Fewest, Fit


def fit(
    model: nn.Module | str,
    *,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
) -> Fit:
    """Whether the model fits, with how much memory to spare.

    Raises :class:`InfeasibleError` where it does not: by how many bytes, which term, and the nearest changes that fit.
    """
    asked = AskedModel(model, example_inputs, loss_fn, global_batch, seq, precision)
    from autoplan.search.questions import fit as answer

    return answer(asked.problem(cluster_of(gpus, device), Wish(strategy, optimizer)))


def min_gpus(
    model: nn.Module | str,
    *,
    gpu: str | None = None,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
) -> Fewest:
    """The fewest GPUs of a kind that hold the model: of ``gpu``, such as "H100", or of the kind and nodes of ``gpus``.

    Without ``global_batch`` (and example inputs) each count runs its own default. Raises :class:`InfeasibleError` where
    no count fits.
    """
    asked = AskedModel(model, example_inputs, loss_fn, global_batch, seq, precision)
    from autoplan.search.questions import min_gpus as answer

    cluster = cluster_of(f"1x{gpu}" if gpu is not None else gpus, device)
    problem = asked.problem(cluster, Wish(strategy, optimizer))
    chosen = global_batch is not None or example_inputs is not None
    return answer(problem, batch_of=None if chosen else lambda count: SAMPLES_A_GPU * count)


def compare(
    model: nn.Module | str,
    *,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
) -> tuple[Contender, ...]:
    """The best plan of every family of parallelism side by side; the chosen plan's is marked."""
    asked = AskedModel(model, example_inputs, loss_fn, global_batch, seq, precision)
    from autoplan.search.questions import compare as answer

    return answer(asked.problem(cluster_of(gpus, device), Wish(strategy, optimizer)))

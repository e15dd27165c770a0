"""The pass that deals positions out: what is split, what is gathered, what is refused, and that every position is
somebody's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autoplan.capture import capture
from autoplan.errors import StrategyError
from autoplan.passes import context_operators
from autoplan.passes.context_parallel import ContextGraph, context_parallel
from autoplan.passes.operators import communicating
from autoplan.passes.weight_loss import weight_loss
from tests.support import models


class Alone:
    """One of ``ranks`` on an axis, for functions that do not communicate."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self, axis: str) -> int:
        return self._rank

    def size(self, axis: str) -> int:
        return self._ranks


def dealt(build: object, degree: int) -> ContextGraph:
    model, batch = build if isinstance(build, tuple) else build()  # type: ignore[operator]
    captured = capture(model, batch)
    return context_parallel(weight_loss(captured).graph_module, captured.inputs, degree=degree, layer_of={})


def functions(graph_module: GraphModule) -> Counter[str]:
    calls = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return Counter(t.__name__ for t in calls if getattr(t, "__module__", "") == context_operators.__name__)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_a_piece_from_the_front_and_one_from_the_back(ranks: int) -> None:
    positions = torch.arange(4 * ranks)
    pieces = []
    for rank in range(ranks):
        with communicating(Alone(rank, ranks)):  # type: ignore[arg-type]
            pieces.append(context_operators.own_positions(positions, "context", 0))
    assert pieces[0].tolist() == [0, 1, 4 * ranks - 2, 4 * ranks - 1]
    assert sorted(torch.cat(pieces).tolist()) == positions.tolist()
    causal_pairs = {int((piece + 1).sum()) for piece in pieces}
    assert len(causal_pairs) == 1  # each position meets itself and all before it


def test_only_attention_communicates() -> None:
    """Four layers: four gathers of keys and values; ids, labels and rotary tables are cut, not sent."""
    found = functions(dealt(models.tiny_llama, 2).graph_module)
    assert found["positions_attention"] == 4
    assert set(found) == {"positions_attention", "own_positions"}


def test_values_are_of_a_ranks_positions() -> None:
    graph = dealt(models.nano_gpt, 4).graph_module.graph
    widths = {tuple(n.meta["val"].shape[1:]) for n in graph.nodes if n.op == "call_function" and "linear" in n.name}
    assert {width[0] for width in widths if len(width) == 2} == {models.SEQUENCE // 4}


def test_an_operator_along_the_sequence_is_refused_by_name() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.conv = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.conv(self.embed(ids).transpose(1, 2)).mean()

    with pytest.raises(StrategyError, match="`conv1d` in conv works along it") as caught:
        dealt((Convolved(), {"ids": torch.zeros(2, 8, dtype=torch.int64)}), 2)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("build", "degree", "words"), [
    (models.small_cnn, 2, "the batch holds none"),
    (models.mlp, 2, "the batch holds none"),
    (models.tiny_llama, 3, "cannot deal out the 16 positions"),
])  # fmt: skip
def test_batches_without_a_sequence_that_divides_are_refused(build: object, degree: int, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        dealt(build, degree)

"""A model that asks how large the batch is: free in the batch where every answer leads to the same operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture


class Asks(nn.Module):
    """What ``forward`` does below and from each of the sizes in ``questions``."""

    def __init__(self, **questions: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = torch.tensor(2.0)
        self.questions = {int(size.removeprefix("from_")): does for size, does in questions.items()}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for size, does in self.questions.items():
            if x.shape[0] >= size:
                y = self.answer(y, does)
        return y.square().mean()

    def answer(self, y: Tensor, does: str) -> Tensor:
        match does:
            case "contiguous":  # it is already: nothing is recorded
                return y.contiguous()
            case "double":
                return y * 2
            case _:
                raise AssertionError(does)


class AsksWhichScale(Asks):
    """The same operator on another constant."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (2.0 if x.shape[0] >= 64 else 3.0)).square().mean()


class AsksWhichTensor(Asks):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((3,), 2.0) if x.shape[0] >= 64 else torch.full((3,), 3.0)
        return (self.linear(x) * scale).square().mean()


class AsksWhichOrder(Asks):
    """The same operators, one of them reading another value."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y.tanh()
        return ((z if x.shape[0] >= 64 else y) * z).square().mean()


class AsksWhetherEven(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if x.shape[0] % 2 else x + 1).square().mean()


def samples(count: int) -> tuple[Tensor]:
    return (torch.randn(count, 3, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("example", [1, 4, 63, 64, 200])
@pytest.mark.parametrize("questions", [{"from_64": "contiguous"}, {"from_40": "contiguous", "from_64": "contiguous"}])
def test_one_path_for_all_answers_leaves_the_batch_free(questions: dict[str, str], example: int) -> None:
    model = Asks(**questions)
    found = capture(model, samples(example))
    assert found.dynamic_batch and not found.notes
    for count in (1, 5, 39, 40, 64, 300):
        assert torch.equal(found.graph_module(*samples(count)), model(*samples(count)))


@pytest.mark.parametrize(
    "model",
    [
        Asks(from_64="double"),
        Asks(from_40="contiguous", from_64="double"),
        AsksWhichScale(),
        AsksWhichTensor(),
        AsksWhichOrder(),
        AsksWhetherEven(),
    ],
    ids=["operator", "second question", "number", "tensor", "order", "even"],
)
@pytest.mark.parametrize("example", [4, 100])
def test_paths_that_differ_fix_the_batch_at_the_examples(model: nn.Module, example: int) -> None:
    found = capture(model, samples(example))
    assert not found.dynamic_batch
    assert any(f"the batch size is fixed at the example's {example}" in note for note in found.notes)
    assert torch.equal(found.graph_module(*samples(example)), model(*samples(example)))


def test_a_batch_that_the_model_writes_out_is_said_in_our_words() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(4, -1).sum()

    found = capture(Written(), torch.randn(4, 8))
    (note,) = (note for note in found.notes if "the batch size is fixed at the example's 4" in note)
    assert "the model makes a number of it" in note and "dynamic" not in note

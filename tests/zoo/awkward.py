"""Models that are legal torch and trip compilers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.entry import HIDDEN, SAMPLES, SEQUENCE, VOCABULARY, Built, Entry, seeded, token_batch


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CalledTwice(nn.Module):
    """One block, called before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = Inner(), Inner()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.shared(self.between(self.shared(x))), y)


class UsedAtBothEnds(nn.Module):
    """A parameter that the first layer reads and the last one again, transposed and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.1)
        self.blocks = nn.ModuleList([Inner() for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.table)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.table.t() * 0.5
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class CountsItsCalls(nn.Module):
    """A buffer that forward advances, and that scales the next step's output."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Inner(), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return F.mse_loss(self.head(self.block(x)) / self.calls, y)


class GivesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Inner(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        made = self.head(self.block(x))
        return {"loss": F.l1_loss(made, y), "made": made, "note": "as it comes"}


@dataclass
class Result:
    loss: Tensor
    made: Tensor | None = None


class GivesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Inner(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Result:
        made = self.head(self.block(x))
        return Result(loss=F.huber_loss(made, y), made=made)


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Inner(), nn.Linear(HIDDEN, 8)

    def forward(self, *, features: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        return self.head(self.block(features["left"] * scale + features["right"]))


class Frozen(nn.Module):
    """The embedding and the first block do not train; low-rank factors beside a frozen matrix do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(VOCABULARY, HIDDEN), Inner(), Inner()
        self.low, self.high = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        for part in (self.embed, self.first, self.second):
            part.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.embed(input_ids))
        x = self.second(x) + self.high(self.low(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Unused(nn.Module):
    """A branch that forward never takes, a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.never = Inner(), Inner()
        self.nobody = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.use_never = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.never(x) if self.use_never else self.block(x)
        return F.mse_loss(self.head(x), y)


class DenselyConnected(nn.Module):
    """Every layer reads all before it; some skips cross several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN * (1 + index), HIDDEN) for index in range(4)])
        self.head = nn.Linear(5 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.relu(layer(torch.cat(seen, dim=-1))) + seen[len(seen) // 2])
        return F.mse_loss(self.head(torch.cat(seen, dim=-1)), y)


class InPlace(nn.Module):
    """Operators that write into their operands, and slices that are assigned to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = self.first(x)
        inner.mul_(0.5).add_(1.0)
        inner = F.relu_(inner)
        outer = self.second(inner).clone()
        outer[:, : HIDDEN // 2] *= 2.0
        outer[:, 0] = 0.25
        outer += x
        return F.mse_loss(outer, y)


class Scalars(nn.Module):
    """Sizes, python numbers and a shape's product in the arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Inner(), nn.Linear(HIDDEN, VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.temperature = 0.7

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) * (HIDDEN**0.5) / x_scale(input_ids.shape[1])
        x = self.block(x) / self.temperature
        logits = self.head(x.reshape(x.shape[0] * x.shape[1], -1))
        return F.cross_entropy(logits, labels.reshape(-1)) + 0.001 * logits.pow(2).mean()


def x_scale(length: int) -> float:
    return 1.0 + float(length) / 10


class Complex(nn.Module):
    """A filter in frequencies: a Fourier transform, a product of complex numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Inner()
        self.real = nn.Parameter(torch.randn(HIDDEN // 2 + 1))
        self.imaginary = nn.Parameter(torch.randn(HIDDEN // 2 + 1))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.block(x)) * torch.complex(self.real, self.imaginary)
        return F.mse_loss(self.head(torch.fft.irfft(spectrum, n=HIDDEN)), y)


def _vectors(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=seeded(seed))


def _pair() -> dict[str, Tensor]:
    return {"x": _vectors(HIDDEN), "y": _vectors(HIDDEN, seed=2)}


def _sequences() -> dict[str, Tensor]:
    return {"x": _vectors(SEQUENCE, HIDDEN), "y": _vectors(SEQUENCE, HIDDEN, seed=2)}


def _keywords() -> dict[str, Any]:
    return {
        "features": {"left": _vectors(HIDDEN), "right": _vectors(HIDDEN, seed=2)},
        "target": torch.arange(SAMPLES),
    }


def _classified(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _entry(
    name: str,
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    *,
    sequence: bool = False,
    loss_fn: Callable[..., Any] | None = None,
) -> Entry:
    def build() -> Built:
        torch.manual_seed(0)
        return make().train(), batch(), loss_fn

    return Entry(name=name, kind="awkward", build=build, sequence=sequence)


AWKWARD = (
    _entry("module called twice", CalledTwice, _sequences, sequence=True),
    _entry("parameter in two stages", UsedAtBothEnds, token_batch, sequence=True),
    _entry("buffer mutated", CountsItsCalls, _pair),
    _entry("dict output", GivesDict, _pair),
    _entry("dataclass output", GivesDataclass, _pair),
    _entry("keyword-only inputs", KeywordsOnly, _keywords, loss_fn=_classified),
    _entry("frozen parts", Frozen, token_batch, sequence=True),
    _entry("unused parameters", Unused, _pair),
    _entry("dense skips", DenselyConnected, _pair),
    _entry("in-place operators", InPlace, _pair),
    _entry("python scalars", Scalars, token_batch, sequence=True),
    _entry("complex numbers", Complex, _pair),
)

"""An entry of the zoo: how to build a model, and which ways of splitting make sense for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SAMPLES = 4
SEQUENCE = 8
VOCABULARY = 48
HIDDEN = 16
HEADS = 4

Built = tuple[nn.Module, Any, Callable[..., Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``build`` returns ``(model, batch, loss_fn or None)``: float32, seeded, no dropout, :data:`SAMPLES` samples.

    ``sequence``: layers hand each other positions with features, so that sequence parallelism means something;
    ``causal``: attention over a sequence that context parallelism may cut; ``experts``: how many of them there are;
    ``missing``: axes that have nothing to split in this model, each with the reason.
    """

    name: str
    kind: str
    build: Callable[[], Built]
    sequence: bool = False
    causal: bool = False
    experts: int = 0
    missing: dict[str, str] = field(default_factory=dict)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(samples: int = SAMPLES, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(1, vocabulary, (samples, sequence), generator=seeded())


def token_batch() -> dict[str, torch.Tensor]:
    """Labels are ignored unevenly: sample i ignores its last i, the last but one all."""
    labels = torch.randint(1, VOCABULARY, (SAMPLES, SEQUENCE), generator=seeded(2))
    for sample in range(SAMPLES):
        labels[sample, SEQUENCE - sample :] = -100
    labels[SAMPLES - 2] = -100
    return {"input_ids": tokens(), "labels": labels}


def image_batch(*, channels: int = 3, size: int = 16, classes: int = 8, key: str = "images") -> dict[str, torch.Tensor]:
    return {
        key: torch.randn(SAMPLES, channels, size, size, generator=seeded()),
        "labels": torch.randint(classes, (SAMPLES,), generator=seeded(2)),
    }

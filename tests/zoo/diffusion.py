"""diffusers' denoisers, as users of it have them: the configuration made small, the library's own modules.

The package is imported where a model is built: it is the zoo's alone, and takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.entry import SAMPLES, SEQUENCE, Built, Entry, seeded

CHANNELS = 4
SIZE = 8
TEXT = 12
CLASSES = 10


def _against_noise(output: Any, noise: Tensor) -> Tensor:
    return F.mse_loss(output.sample, noise)


def _noisy(seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, CHANNELS, SIZE, SIZE, generator=seeded(seed))


def _steps() -> Tensor:
    return torch.randint(1000, (SAMPLES,), generator=seeded(2))


def unet() -> Built:
    """The U-Net of Stable Diffusion: one level with attention to the text, one of convolutions, skips between."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=SIZE,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=TEXT,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    text = torch.randn(SAMPLES, SEQUENCE, TEXT, generator=seeded(3))
    batch = {"sample": _noisy(), "timestep": _steps(), "encoder_hidden_states": text, "noise": _noisy(4)}
    return model.train(), batch, _against_noise


def dit() -> Built:
    """The transformer of DiT: two blocks whose norms are shifted by the step and the class."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=4,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        sample_size=SIZE,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
        dropout=0.0,
    )
    for block in model.transformer_blocks:  # which classes are forgotten is drawn anew for each batch
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    labels = torch.randint(CLASSES, (SAMPLES,), generator=seeded(3))
    batch = {"hidden_states": _noisy(), "timestep": _steps(), "class_labels": labels, "noise": _noisy(4)}
    return model.train(), batch, _against_noise


DIFFUSION = (
    Entry(name="diffusers U-Net", kind="diffusers", build=unet),
    Entry(name="diffusers DiT", kind="diffusers", build=dit, sequence=True),
)

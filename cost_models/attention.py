"""Time of the fused attention core (FlashAttention, Dao 2023, and the kernels like it in cuDNN and torch's SDPA).

    forward FLOPs  = 2 x heads x queries x keys x (head_dim + value_dim), halved where causal
    backward FLOPs = 2.5 x forward: five products of which one recomputes the scores

The best rate is the device's; short rows cost the pipeline's fill, more so for causal (half of the diagonal tile is
wasted), narrow heads feed the tensor cores less. Constants [Empirical] from the tables of the FlashAttention-2 paper
(A100; head dimensions 64 and 128; lengths 512 to 16k).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoplan.cluster import Device
from autoplan.cost_models import cpu
from autoplan.cost_models.precision import short_dtype
from autoplan.cost_models.software import EAGER, Software

if TYPE_CHECKING:
    from autoplan.layers.types import Attention

BACKWARD_FLOPS = 2.5
_ROW_TILE = 128
_FILL_CAUSAL = 450.0  # keys: rate(length) = best x length / (length + fill)
_FILL_FULL = 110.0
_MASKED = 0.6  # an explicit mask takes the memory-efficient kernel and reads the mask


def attention_flops(attention: Attention) -> float:
    """Useful FLOPs of one sample's forward."""
    full = 2.0 * attention.heads * attention.query_length * attention.key_length
    return full * (attention.head_dim + attention.value_dim) * (0.5 if attention.causal else 1.0)


def attention_time_s(
    attention: Attention,
    device: Device,
    *,
    dtype: str,
    samples: int,
    backward: bool,
    software: Software = EAGER,
) -> float:
    """Seconds of the core for ``samples`` samples."""
    flops = attention_flops(attention) * samples * (BACKWARD_FLOPS if backward else 1.0)
    best = device.attention_backward_efficiency if backward else device.attention_forward_efficiency
    rate = device.flops(short_dtype(dtype)) * min(1.0, best * software.attention)
    return flops / (rate * _shape_efficiency(attention, device, samples))


def _shape_efficiency(attention: Attention, device: Device, samples: int) -> float:
    if device.is_cpu:
        return cpu.attention_efficiency(attention.key_length, causal=attention.causal)
    fill = _FILL_CAUSAL if attention.causal else _FILL_FULL
    efficiency = attention.key_length / (attention.key_length + fill)
    efficiency *= _head_efficiency(max(attention.head_dim, attention.value_dim))
    blocks = samples * attention.heads * math.ceil(attention.query_length / _ROW_TILE)
    efficiency *= blocks / (math.ceil(blocks / device.sms) * device.sms)
    return efficiency * (_MASKED if attention.masked else 1.0)


def _head_efficiency(head_dim: int) -> float:
    """1 at 128; heads are padded to a multiple of 32, narrow ones spend more on the softmax, wide ones spill."""
    padded = math.ceil(head_dim / 32) * 32
    return head_dim / padded * min(1.0, 0.68 + 0.32 * padded / 128) * min(1.0, 160 / padded)

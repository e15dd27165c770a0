"""What differs on a CPU: one thread computes, nothing runs beside it, and gloo moves the data.

Arithmetic of element-wise operators: an exponential or a variance keeps a core's vector units busy for longer than its
bytes keep the memory. Counted in FLOPs an element at the rate of the fp32 products, which the same units compute.

Products: each of the three sizes pays a start-up worth 8 elements, so that 64 rows reach 0.89 of what 1024 do.

Causal attention: the CPU kernel works on blocks of 512 keys and computes every block that it touches, so b blocks of
keys cost (b + 1) / 2b of the square and causal saves nothing up to 512 (aten/native/cpu/FlashAttentionKernel.cpp).
Short rows pay the set-up of small products: rate(keys) = best x keys / (keys + 32).

The optimizer: on a CPU torch.optim works parameter by parameter, operator by operator. AdamW reads and writes 20 values
an element (decay 2, first moment 3, second 2 + 3, root 2, correction 2, epsilon 2, update 4) where a fused step has 7.

gloo, in messages of alpha and passes over the bytes at beta: a transfer's wire is a copy into the kernel and one out of
it, by the same cores that compute, and what a collective adds up or gathers into its list of tensors is copied again:

    send            1 message     bytes
    all-gather      2 (n - 1)     bytes x ((n - 1)/n + 3/2)     flattened, and copied out
    all-reduce      3 (n - 1)     bytes x (2 (n - 1)/n + 1)     added up
    reduce-scatter  6 (n - 1)     bytes x (2 (n - 1)/n + 2)     an all-reduce of the flattened list

[Empirical] FLOPs an element, the start-ups, messages and passes: torch 2.13 on a Zen 5 core, 2 ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from autoplan.cluster import Device, Link
from autoplan.cost_models.precision import dtype_bytes

if TYPE_CHECKING:
    from autoplan.layers.types import Operator

Collective = Literal["send", "all_gather", "all_reduce", "reduce_scatter"]

OPTIMIZER_PASSES = 20 / 7
_KEY_BLOCK = 512
_FILL_KEYS = 32
_START_UP = 8
# FLOPs an element of output: (forward, backward).
_OF_KIND = {"normalization": (64.0, 38.0), "softmax": (48.0, 30.0), "cross_entropy": (60.0, 60.0)}
_TRANSCENDENTAL = (30.0, 75.0)
_TRANSCENDENTALS = frozenset(
    ("gelu", "silu", "exp", "tanh", "sigmoid", "erf", "log", "sin", "cos", "softplus", "mish", "elu", "selu")
)


def arithmetic_s(op: Operator, device: Device, *, samples: int, backward: bool) -> float:
    """Seconds of the vector units for an operator that is no product."""
    if op.kind == "elementwise":
        name = op.target.rpartition("::")[2].removeprefix("aten.").split(".")[0].rstrip("_")
        each = _TRANSCENDENTAL if name in _TRANSCENDENTALS else (0.0, 0.0)
    else:
        each = _OF_KIND.get(op.kind, (0.0, 0.0))
    elements = op.written_bytes * samples / dtype_bytes(op.dtype)
    return elements * each[backward] / (device.flops("fp32") * device.gemm_efficiency)


def product_efficiency(m: int, n: int, k: int) -> float:
    """Share of the best rate of a product [m, k] x [k, n]; the same for its two gradients, which permute the sizes."""
    return m / (m + _START_UP) * n / (n + _START_UP) * k / (k + _START_UP)


def attention_efficiency(key_length: int, *, causal: bool) -> float:
    """Share of the best rate that rows of ``key_length`` reach, in useful FLOPs: half of the square where causal."""
    efficiency = key_length / (key_length + _FILL_KEYS)
    blocks = -(-key_length // _KEY_BLOCK)
    return efficiency * blocks / (blocks + 1) if causal else efficiency


def gloo_s(collective: Collective, link: Link, *, ranks: int, bytes_: float) -> float:
    """Seconds of a collective of ``bytes_`` (the full tensor) among ``ranks`` processes over ``link``."""
    share = (ranks - 1) / ranks
    messages, passes = {
        "send": (1, 1.0),
        "all_gather": (2 * (ranks - 1), share + 1.5),
        "all_reduce": (3 * (ranks - 1), 2 * share + 1),
        "reduce_scatter": (6 * (ranks - 1), 2 * share + 2),
    }[collective]
    return messages * link.latency_s + passes * bytes_ / link.bytes_per_s

"""What differs on a CPU: one thread computes, nothing runs beside it, and gloo moves the data.

Arithmetic of element-wise operators: an exponential or a variance keeps a core's vector units busy as long as its bytes
keep the memory, and adds to it: results go to memory that is in no cache, and its lines are waited for. Counted in
FLOPs an element at the rate of the fp32 products, which the same units compute.

Products: each of the three sizes pays a start-up worth 8 elements, so that 64 rows reach 0.89 of what 1024 do.

Causal attention: the CPU kernel works on blocks of 512 keys and computes every block that it touches, so b blocks of
keys cost (b + 1) / 2b of the square and causal saves nothing up to 512 (aten/native/cpu/FlashAttentionKernel.cpp).
Short rows pay the set-up of small products: rate(keys) = best x keys / (keys + 32).

The optimizer: on a CPU torch.optim works parameter by parameter, operator by operator. AdamW reads and writes 20 values
an element (decay 2, first moment 3, second 2 + 3, root 2, correction 2, epsilon 2, update 4) where a fused step has 7.

Dispatch: every operator of a step, views included, costs the host ``launch_s`` in the forward and again in the
backward; a product pays twice in the forward and four times in the backward (the gradients of input, weight and bias,
and their accumulation). A step meets each operator once, its code
in no cache: 4 to 5 times what one costs in a row of its like, and that is how ``autoplan calibrate`` measures it.

Collectives of a layer work on a copy of what they are given (or copy into place what comes): two passes over the whole
tensor by the rank's own thread, and two more in the forward for a bias that is added after the sum and not by the
product (:mod:`autoplan.passes.operators`).

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
from autoplan.cost_models.arrays import Number
from autoplan.cost_models.precision import dtype_bytes

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind, Operator

Collective = Literal["send", "all_gather", "all_reduce", "reduce_scatter"]

OPTIMIZER_PASSES = 20 / 7
_KEY_BLOCK = 512
_FILL_KEYS = 32
_START_UP = 8
# FLOPs an element of output: (forward, backward).
_OF_KIND = {"normalization": (50.0, 12.0), "softmax": (32.0, 8.0), "cross_entropy": (44.0, 36.0)}
_TRANSCENDENTAL = (20.0, 40.0)
_TRANSCENDENTALS = frozenset(
    ("gelu", "silu", "exp", "tanh", "sigmoid", "erf", "log", "sin", "cos", "softplus", "mish", "elu", "selu")
)


_PRODUCT_LAUNCHES = (2, 4)  # forward and backward: views of the weight, products, sums and accumulation
_PYTHON_ALONE = ("operator.", "aten.sym_size")  # items of lists and sizes: nothing is dispatched
_COPY_PASSES = 2


def host_s(kind: LayerKind, device: Device, *, micro_batch: int) -> tuple[float, float]:
    """Seconds in a forward and in a backward that a layer of ``micro_batch`` samples costs a rank's thread beside its
    operators' own: dispatch, and the copies around collectives."""
    dispatched = [op for op in kind.operators if not op.target.startswith(_PYTHON_ALONE)]
    forward, backward = (
        device.launch_s * sum(_PRODUCT_LAUNCHES[back] if op.kind == "gemm" else 1 for op in ops)
        for back, ops in enumerate((dispatched, [op for op in dispatched if op.needs_backward]))
    )
    rate = device.memory_bytes_per_s * device.memory_efficiency
    biased = {op.name for op in kind.operators if _has_bias(op)}
    for collective in kind.collectives:
        full = collective.bytes_per_sample * (micro_batch if collective.batched else 1)
        if collective.phase == "backward":
            backward += _COPY_PASSES * full / rate
        else:
            passes = 2 * _COPY_PASSES if collective.operator in biased else _COPY_PASSES
            forward += passes * full / rate
    return forward, backward


def _has_bias(op: Operator) -> bool:
    return op.gemm is not None and op.parameter_bytes > op.gemm.n * op.gemm.k * op.gemm.groups * dtype_bytes(op.dtype)


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


def gloo_s(collective: Collective, link: Link, *, ranks: int, bytes_: Number) -> Number:
    """Seconds of a collective of ``bytes_`` (the full tensor, or many) among ``ranks`` processes over ``link``."""
    share = (ranks - 1) / ranks
    messages, passes = {
        "send": (1, 1.0),
        "all_gather": (2 * (ranks - 1), share + 1.5),
        "all_reduce": (3 * (ranks - 1), 2 * share + 1),
        "reduce_scatter": (6 * (ranks - 1), 2 * share + 2),
    }[collective]
    return messages * link.latency_s + passes * bytes_ / link.bytes_per_s

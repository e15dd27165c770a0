"""What a matrix product reaches: tiles, waves, depth and alignment.

A kernel computes C[m, n] in tiles; ``SMs`` tiles run at once (one wave), and the last wave runs partly empty:

    time = waves x (tile FLOPs x (k + k0) / k) / (peak / SMs x tile efficiency x device.gemm_efficiency)

so that hidden 14400 against 13824 differs as measured. The library picks the best tile and may split a deep k over
several tiles (split-k, which writes partial sums once more). ``k0`` is the depth that prologue and epilogue cost.
Tile shapes are cuBLAS's and CUTLASS's usual ones; their efficiencies and ``k0`` [Empirical]: fits to published sweeps
of square products on A100 (0.5 of the best rate at 1024^3, 0.85 at 2048^3, 0.97 at 4096^3).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autoplan.cluster import Device
from autoplan.cost_models import cpu
from autoplan.cost_models.arrays import Number, chosen, larger, smaller, some
from autoplan.cost_models.precision import dtype_bytes, short_dtype

if TYPE_CHECKING:
    from autoplan.layers.types import Gemm

Product = Literal["forward", "input", "weight"]

# (rows, columns, share of the best tile's rate): smaller tiles reread more from shared memory.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (256, 64, 0.85), (64, 256, 0.85), (64, 64, 0.68))
_SPLITS = (1, 2, 3, 4, 6, 8)
_LEAST_SPLIT = 512  # a part of a depth that is split takes no less than this
_DEPTH = 96  # k0, elements of bf16
# Rows that are no multiple of 16 bytes: no vector loads, slower kernels. [Empirical] A vocabulary of 50257 for 50304
# costs nanoGPT about 25% of a step; batched products fare worse: head dimension 108 costs BLOOM's grid 25 to 50%.
_MISALIGNED = 0.45
_MISALIGNED_BATCHED = 0.08
_TENSOR_DTYPES = ("bf16", "fp16", "fp8", "fp4", "tf32")


def gemm_time_s(gemm: Gemm, device: Device, *, dtype: str, samples: int, product: Product = "forward") -> float:
    """Seconds of one of the three products of a linear layer, for ``samples`` samples; memory traffic is not in it.

    ``input`` is the gradient of the input ([m, n] x [n, k]), ``weight`` of the weight ([k, m] x [m, n]). Sizes may be
    arrays of equal length, of many products at once (not on a CPU).
    """
    m = gemm.m if gemm.batch_in_groups else gemm.m * samples
    groups = gemm.groups * samples if gemm.batch_in_groups else gemm.groups
    sizes = {"forward": (m, gemm.n, gemm.k), "input": (m, gemm.k, gemm.n), "weight": (gemm.k, gemm.n, m)}
    if device.is_cpu:
        rate = device.flops(short_dtype(dtype)) * device.gemm_efficiency * cpu.product_efficiency(m, gemm.n, gemm.k)
        return 2.0 * m * gemm.n * gemm.k * groups / rate
    peak = device.flops(short_dtype(dtype)) * device.gemm_efficiency
    efficiency = shape_efficiency(
        *sizes[product], groups=groups, sms=device.sms, dtype=short_dtype(dtype), rows=(gemm.n, gemm.k)
    )
    return 2.0 * m * gemm.n * gemm.k * groups / (peak * efficiency)


def shape_efficiency(m: int, n: int, k: int, *, groups: int, sms: int, dtype: str, rows: tuple[int, ...] = ()) -> float:
    """Share (0 to 1) of the device's best product rate that ``groups`` products [m, k] x [k, n] reach.

    ``rows``: elements of the operands' rows in memory, n and k unless given. In all three products of a linear layer
    they are the forward's n and k (x [m, k], w [n, k], y [m, n]): the tokens that an expert got never misalign. All
    sizes may be arrays.
    """
    priced = _shape_efficiency if isinstance(m, np.ndarray) else _remembered
    return priced(m, n, k, groups, sms, dtype, rows or (n, k))


def _shape_efficiency(m: Number, n: Number, k: Number, groups: Number, sms: int, dtype: str, rows: Number) -> Any:
    depth = _DEPTH * 2 / dtype_bytes(dtype)
    useful = m * n * k * groups
    best: Number = 0.0
    for tile_rows, columns, tile_efficiency in _TILES:
        tiles = -(-m // tile_rows) * -(-n // columns) * groups
        for split in _SPLITS:
            sensible: Number = split == 1 or tiles * split <= 2 * sms
            if split > 1 and not some(sensible):
                break
            waves = -(-tiles * split // sms)
            # Partial sums are written and read in fp32: as many elements of depth again for each further split.
            deep = k + depth if split == 1 else larger(k / split, _LEAST_SPLIT) + 2 * depth
            capacity = waves * sms * tile_rows * columns * deep
            best = larger(best, useful * tile_efficiency / capacity * sensible)
    if dtype in _TENSOR_DTYPES:
        width, odd = dtype_bytes(dtype), False
        for size in rows:
            odd = odd | (size * width % 16 != 0)
        best = chosen(odd, best * chosen(groups == 1, _MISALIGNED, _MISALIGNED_BATCHED), best)
    return larger(smaller(best, 1.0), 1e-6)


_remembered = functools.lru_cache(maxsize=65536)(_shape_efficiency)

"""Names of floating dtypes and their sizes: torch's spelling and the short one mean the same."""

from __future__ import annotations

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64"}
_SHORT |= {"double": "fp64", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "tf32": 4.0, "fp64": 8.0, "fp8": 1.0, "fp4": 0.5}


def short_dtype(name: str) -> str:
    """``torch.bfloat16``, ``bfloat16`` and ``bf16`` are all ``bf16``; an integer dtype keeps its name."""
    bare = name.removeprefix("torch.")
    return _SHORT.get(bare, bare)


def product_dtype(precision: str) -> str:
    """The dtype whose peak the products of a training precision run at: ``fp8`` for ``mxfp8``, ``bf16`` for
    ``bf16-pure``."""
    short = precision.lower().split("-")[0]
    return {"mxfp8": "fp8", "nvfp4": "fp4"}.get(short, short)


def dtype_bytes(name: str) -> float:
    """Bytes of one element; 4 for what is no floating dtype (indices are read seldom)."""
    return _BYTES.get(short_dtype(name), 4.0)

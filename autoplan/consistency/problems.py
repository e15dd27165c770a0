"""What a check finds, and how near two figures must be."""

from __future__ import annotations

Problem = tuple[str, str]
"""A field by its path in the file, and in what it disagrees: what is written, and what it must be."""

# JSON keeps every digit of a float; sums of thousands of micro-batches, taken in another order, round by less.
EXACT = 1e-9


def close(one: float, other: float, tolerance: float = EXACT) -> bool:
    """Whether two figures, none below 0, are the same but for rounding."""
    return abs(one - other) <= tolerance * max(one, other)

"""The minimum of a layer's pairwise model: exactly by elimination where that is small, else by the integer program.

Both are exact, and tests hold them equal. Eliminating a variable makes one table over its neighbours: in a block of a
transformer it has two or three, so that tables are small and the minimum is found in milliseconds, where stating the
integer program takes longer than solving it. A graph whose every order makes a table larger than :data:`LARGEST_TABLE`
(values that many operators share, under many placements each) is the integer program's.
"""

from __future__ import annotations

from collections.abc import Set

from autoplan.sharding import elimination, ilp
from autoplan.sharding.model import PairwiseModel, merge_followers

LARGEST_TABLE = 1 << 16  # numbers: half a megabyte


def minimise(model: PairwiseModel, followers: Set[int] = frozenset()) -> list[int]:
    """The choice of every variable at a proven minimum; ``followers`` are merged into their neighbours first."""
    merged = merge_followers(model, set(followers))
    order = elimination.order(merged.model, largest=LARGEST_TABLE)
    return merged.expand(ilp.choices(merged.model) if order is None else elimination.minimise(merged.model, order))

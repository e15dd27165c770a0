"""What all tests share."""

from __future__ import annotations

import gc

# Thousands of tests run in one process, beside torch's own objects: each look for cycles goes through all of them, and
# in every forked rank copies the pages that they are on. Seldom is enough, and a sixth of the processor's time less.
gc.set_threshold(100_000, 50, 100)

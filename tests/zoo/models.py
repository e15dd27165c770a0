"""All models of the zoo, in the order of its table."""

from __future__ import annotations

from tests.zoo.awkward import AWKWARD
from tests.zoo.diffusion import DIFFUSION
from tests.zoo.entry import Entry
from tests.zoo.families import FAMILIES
from tests.zoo.plain import PLAIN

ZOO: tuple[Entry, ...] = (*FAMILIES, *DIFFUSION, *PLAIN, *AWKWARD)
BY_NAME = {entry.name: entry for entry in ZOO}

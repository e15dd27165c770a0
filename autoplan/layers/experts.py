"""Which parameters belong to experts: of them an expert axis gives some to each rank.

A model's own words tell: a module called ``experts`` (transformers' stacked [experts, ...] parameters, a ModuleList of
experts), or of a class that ends in Expert or Experts (GraniteMoeParallelExperts). Experts that every token passes are
called shared, and are ordinary layers; so is the router.
"""

from __future__ import annotations

import re

from torch.fx import Node

from autoplan.layers.facts import module_stack

_NAME = re.compile(r"(?:.*_)?experts")
_CLASS = re.compile(r".*Experts?")


def is_expert(source: Node) -> bool:
    """Whether the parameter that the get_attr node ``source`` reads is an expert's."""
    name = str(source.target)
    path = name.split(".")[:-1]
    if any("shared" in part for part in path):
        return False
    if any(_NAME.fullmatch(part) for part in path):
        return True
    owners = {kind for reader in source.users for at, kind in module_stack(reader) if _holds(at, name)}
    return any(_CLASS.fullmatch(kind.rpartition(".")[2]) for kind in owners)


def _holds(path: str, name: str) -> bool:
    return name.startswith(f"{path.partition('@')[0]}.")

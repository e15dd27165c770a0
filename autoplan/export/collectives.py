"""collectives.py of an emitted folder: what blocks call, taken from :mod:`autoplan.passes.operators` as it stands."""

from __future__ import annotations

from collections.abc import Collection

from autoplan.export.extract import extract
from autoplan.passes import operators

_DOCSTRING = """What blocks call where the tensor axis splits them: collectives with the right backward.

copy_to_axis and reduce_from_axis are f and g of Megatron-LM (Shoeybi et al. 2019, section 3). The ranks of the axis are
those of the communicator that `communicating` installs around a stage.
"""
_ALWAYS = ("communicating",)


def collectives_source(called: Collection[str]) -> str:
    """The text of collectives.py for the functions that are called."""
    return extract(operators, {*called, *_ALWAYS}, docstring=_DOCSTRING)

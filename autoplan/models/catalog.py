"""The presets: Hugging Face configs shipped with autoplan, each with its source. Imports no torch."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from autoplan.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """``parameters`` is the distinct count, tied ones once; ``source`` names the paper and the card."""

    name: str
    parameters: int
    source: str

    @property
    def path(self) -> Traversable:
        """The config.json of this preset."""
        return _folder() / f"{self.name}.json"


def presets() -> tuple[Preset, ...]:
    """Every preset, smallest first."""
    table = tomllib.loads((_folder() / "sources.toml").read_text(encoding="utf-8"))
    found = (Preset(name=name, **entry) for name, entry in table.items())
    return tuple(sorted(found, key=lambda preset: preset.parameters))


def preset(name: str) -> Preset:
    """The preset called ``name``; raises :class:`ModelError` with the nearest names."""
    known = {entry.name: entry for entry in presets()}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    advice = f"did you mean {', '.join(near)}? `autoplan models` lists all" if near else "`autoplan models` lists them"
    if "/" in name:
        advice = "nothing is downloaded: save the model's config.json and give its path"
    raise ModelError(
        f"unknown model {name!r}",
        legal="a preset, a Hugging Face config.json, or file.py:factory",
        attempt=advice,
    )


def _folder() -> Traversable:
    return resources.files("autoplan.models") / "presets"

"""MODEL by name: the presets, which are Hugging Face configs with their sources, and config files. Imports no torch."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from autoplan.errors import ModelError

_FACTORY = re.compile(r"\.py:[^:/\\]*$")


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


def is_factory(model: str) -> bool:
    """Whether MODEL is ``file.py:factory``."""
    return _FACTORY.search(model) is not None


def check_named(model: str) -> None:
    """Raise :class:`ModelError` where MODEL names nothing that is there: at once, before torch is imported."""
    if not is_factory(model):
        config_text(model)


def config_text(model: str) -> tuple[str, str, str]:
    """(text, where it stands, name) of a preset or a config file; a preset's name wins over a folder's."""
    if model.endswith(".py"):
        raise ModelError(f"{model} names a file and no factory", legal="file.py:factory", attempt=f"{model}:build")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    known = model.lower() in {entry.name for entry in presets()}
    if not known and (path.suffix == ".json" or path.is_file()):
        return _config(path), str(path), path.resolve().parent.name if path.stem == "config" else path.stem
    entry = preset(model)
    return entry.path.read_text(encoding="utf-8"), f"preset {entry.name}", entry.name


def _config(path: Path) -> str:
    """The text of a config file; a plan file in its place is said to be one."""
    text = _read(path)
    if '"certificate"' in text and '"strategy"' in text:
        raise ModelError(
            f"{path} is a plan file, and MODEL is the model that it is for",
            legal="a preset, a Hugging Face config.json, or file.py:factory",
            attempt=f"MODEL first, then the plan, as in `autoplan verify MODEL {path}`",
        )
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"cannot read the config: {error.strerror}", where=str(path), attempt="check the path"
        ) from None
    except UnicodeDecodeError:
        raise ModelError("malformed config: not a text file", where=str(path)) from None


def _folder() -> Traversable:
    return resources.files("autoplan.models") / "presets"

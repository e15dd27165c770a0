"""The settings of another tool's file, by dotted name, and which of them were asked for.

What nobody asked for is not priced, and is said; a name that is one slip away from one that was asked for is refused,
as what was meant would silently have been left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from autoplan.errors import PlanFileError

_ALIKE = 0.87  # of difflib's ratio: one letter wrong of 8, two of 16
_SHOWN = 12


class Settings:
    """``found``: value by dotted name (``zero_optimization.stage``). ``where`` names the file in errors.

    ``others``: the tool's own names that are like one of those that are read, and mean something else.
    """

    def __init__(self, found: Mapping[str, Any], where: str, *, others: Collection[str] = ()) -> None:
        self._found, self.where, self._others = dict(found), where, frozenset(others)
        self._asked: set[str] = set()
        self._aside: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return self._found.get(name, default)

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self._found

    def within(self, section: str) -> dict[str, Any]:
        """What stands at ``section`` or in it, all of it asked for."""
        inside = {name: value for name, value in self._found.items() if f"{name}.".startswith(f"{section}.")}
        self._asked.update(inside)
        return inside

    def aside(self, *names: str) -> None:
        """Names that change neither time nor memory, or that another line of the file says again."""
        self._aside.update(names)

    def not_priced(self) -> tuple[str, ...]:
        """A line with what was not asked for, a section of which nothing was by its name alone; none where all was.

        Raises PlanFileError for a name like one that was asked for.
        """
        unread = [name for name in self._found if name not in self._asked | self._aside]
        for name in unread:
            self._refuse_slip(name)
        read_sections = {section for name in self._asked | self._aside for section in _sections(name)}
        shown = list(dict.fromkeys(_outermost(name, read_sections) for name in unread))
        if not shown:
            return ()
        more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return (f"not priced: {', '.join(shown[:_SHOWN])}{more}",)

    def _refuse_slip(self, name: str) -> None:
        if name in self._others:
            return
        likely = max(
            (meant for meant in self._asked - self._found.keys() if _is_slip(name, meant)),
            key=lambda meant: SequenceMatcher(None, name, meant).ratio(),
            default=None,
        )
        if likely is not None:
            raise PlanFileError(
                f"{name} is no setting that is read", where=self.where, legal=likely, attempt=f"{likely} was meant?"
            )


def flattened(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of nested settings; an empty section is a value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sections(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _outermost(name: str, read: Collection[str]) -> str:
    """The outermost section of ``name`` of which nothing was read, else all of it."""
    return next((section for section in _sections(name) if section not in read), name)


def _is_slip(name: str, meant: str) -> bool:
    """Whether the names differ in one of their parts, and there by little."""
    pairs = list(zip(name.split("."), meant.split("."), strict=False))
    if name.count(".") != meant.count("."):
        return False
    unlike = [(_plain(a), _plain(b)) for a, b in pairs if a != b]
    return len(unlike) == 1 and SequenceMatcher(None, *unlike[0], autojunk=False).ratio() >= _ALIKE


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")

"""What holds while blocks are folded: nobody sets attributes of a block, and nobody asks what a hollow one holds.

Attributes are compared by identity, and what containers and plain objects among them hold too, one level deep: a model
that hands its blocks something by an attribute, between two calls, is noticed.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_BOOKS = ("_parameters", "_buffers", "_modules")
_OPAQUE = (nn.Module, Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)


class Attributes:
    """The attributes of a module and of all in it, at one moment. ``modules``: of the block as the user made it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._kept = [
            (module.__dict__, {name: value for name, value in module.__dict__.items() if name not in _BOOKS})
            for module in modules
        ]
        held = {id(value): value for _, kept in self._kept for value in kept.values()}
        self._contents = [(value, inside) for value in held.values() if (inside := _contents(value)) is not None]

    def have_changed(self) -> bool:
        """Whether any is another now, or holds something else."""
        for now, kept in self._kept:
            if len(now) != len(kept) + len(_BOOKS) or any(
                now.get(name, now) is not value for name, value in kept.items()
            ):
                return True
        return any(not _identical(_contents(value), inside) for value, inside in self._contents)


def _contents(value: Any) -> list[Any] | None:
    """What a container or a plain object holds; None for what holds nothing, or answers for itself."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*value]
    inside = None if isinstance(value, _OPAQUE) else getattr(type(value), "__dict__", {}).get("__dict__")
    return None if inside is None else [*vars(value).keys(), *vars(value).values()]


def _identical(one: list[Any] | None, other: list[Any]) -> bool:
    return one is not None and len(one) == len(other) and all(map(_is_or_equals, one, other))


def _is_or_equals(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (str, int)) and type(one) is type(other) and one == other)


class _Empty(dict[str, Any]):
    """The parameters, buffers or children of a hollow block: none; ``asked`` is told whenever someone looks."""

    def __init__(self, asked: Callable[[], None]) -> None:
        super().__init__()
        self._asked = asked

    def __contains__(self, key: object) -> bool:
        self._asked()
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._asked()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self._asked()
        return super().__iter__()

    def __len__(self) -> int:
        self._asked()
        return super().__len__()

    def get(self, key: str, default: Any = None) -> Any:
        self._asked()
        return super().get(key, default)

    def keys(self) -> Any:
        self._asked()
        return super().keys()

    def values(self) -> Any:
        self._asked()
        return super().values()

    def items(self) -> Any:
        self._asked()
        return super().items()


def is_hollow(module: nn.Module) -> bool:
    """Whether the module holds nothing for now; asks it nothing."""
    return isinstance(module.__dict__[_BOOKS[0]], _Empty)


@contextlib.contextmanager
def hollow(modules: list[nn.Module], asked: Callable[[], None]) -> Iterator[None]:
    """While inside, the modules hold nothing; ``asked`` is called when someone wants to know."""
    books = [(module.__dict__, book, module.__dict__[book]) for module in modules for book in _BOOKS]
    try:
        for attributes, book, _ in books:
            attributes[book] = _Empty(asked)
        yield
    finally:
        for attributes, book, content in books:
            attributes[book] = content

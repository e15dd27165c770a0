"""The Python objects that a forward can reach and change: attributes of its modules and what they hold, however deep;
attributes of their classes; variables, globals and defaults that the user's functions name; generators of random
numbers and iterators among them.

:class:`Reach` finds them once, :meth:`Reach.snapshot` keeps what they hold at one moment, tells what is not so any
more, and puts it back. What is not a user's is left out: torch's books, the standard library, functions of libraries.
"""

from __future__ import annotations

import collections
import functools
import itertools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autoplan.capture.holders import Holder, global_generators, held, is_iterator, of_object

_MOST = 100_000  # objects looked at: a model that holds its data set is not searched to the last sample
_ITEMS = 10_000  # of one container, whose own length and members are compared all the same
_LIBRARIES = frozenset(
    {"torch", "numpy", "transformers", "diffusers", "triton", "accelerate", "peft", "autoplan", "pytest", "pluggy"}
)
_ATOMS = (int, float, complex, str, bytes, type(None), Tensor, types.ModuleType, types.BuiltinFunctionType)
_OF_PYTHON = (
    types.SimpleNamespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    queue.Queue,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)


class Reach:
    """What is reachable from ``roots``, modules or functions by name. ``named``: every global that a user's function
    names, as (its module's dictionary, the name); ``words``: all names in the users' code but for ``__init__``'s."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self.holders = global_generators()
        self.named: list[tuple[dict[str, Any], str]] = []
        self.words: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._codes: set[types.CodeType] = set()
        self._open: collections.deque[tuple[str, Any]] = collections.deque(roots.items())
        while self._open and len(self._seen) < _MOST:
            self._visit(*self._open.popleft())

    def snapshot(self) -> Snapshot:
        return Snapshot(self.holders)

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._open += [(path, value.__self__), (path, value.__func__)]
        elif isinstance(value, functools.partial):
            self._open += [(path, value.func), (path, value.args), (path, value.keywords)]
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._open.append((path, value.__wrapped__))
        else:
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        holder = held(path, value)
        if holder is None and isinstance(value, (tuple, frozenset)):
            self._open += [(path, item) for item in itertools.islice(value, _ITEMS)]
            return
        if holder is None:
            return
        is_plain = not isinstance(value, (dict, list, set, collections.deque, nn.Module)) and hasattr(value, "__dict__")
        if is_plain and not _may_be_looked_into(type(value)):
            return
        self.holders.append(holder)
        self._open += itertools.islice(holder.items(), _ITEMS)
        if isinstance(value, nn.Module):
            self.holders.append(Holder.of_buffers(path, value))
            hooks = (*value._forward_hooks.values(), *value._forward_pre_hooks.values())
            self._open += [(f"{path}'s hook", hook) for hook in hooks]
            children = value._modules.items()
            self._open += [(f"{path}.{name}", child) for name, child in children if child is not None]
        if not is_iterator(value):
            self._open.append((type(value).__qualname__, type(value)))

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not is_users(base):
                continue
            data = {name for name, value in vars(base).items() if _is_data(name, value)}
            if data:
                self.holders.append(Holder.of_class(base, data))
            for name, value in vars(base).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
                if name in data or callable(function):
                    self._open.append((f"{base.__qualname__}.{name}", function))

    def _function(self, function: types.FunctionType) -> None:
        # Where its globals are tells whose it is: a library's wrapper bears the name and module of what it wraps.
        if not _is_users_module(function.__globals__.get("__name__") or function.__module__ or ""):
            if is_users(function) and hasattr(function, "__wrapped__"):
                self._open.append((function.__qualname__, function.__wrapped__))
            return
        name = function.__qualname__.rpartition("<locals>.")[2]
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            holder = Holder.of_cell(f"{variable}, a variable outside of {name}", cell)
            if holder is not None and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self.holders.append(holder)
                self._open += holder.items()
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._open += [(f"a default of {name}", value) for value in defaults]
        if vars(function):
            self.holders.append(of_object(name, function, frozenset()))
            self._open += self.holders[-1].items()
        self._names(function.__code__, function.__globals__)
        if function.__name__ != "__init__":
            self.words.update(_words(function.__code__))

    def _names(self, code: types.CodeType, known: dict[str, Any]) -> None:
        """The globals that ``code`` and the functions in it name; of modules of the user's, their attributes."""
        if code in self._codes:
            return
        self._codes.add(code)
        self._globals([name for name in code.co_names if name in known], known)
        for name in code.co_names:
            module = known.get(name)
            if isinstance(module, types.ModuleType) and _is_users_module(module.__name__):
                self._globals([other for other in code.co_names if other in vars(module)], vars(module))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._names(constant, known)

    def _globals(self, names: list[str], known: dict[str, Any]) -> None:
        self.named += [(known, name) for name in names]
        self.holders += [Holder.of_global(name, known) for name in names]
        self._open += [(f"the global {name}", known[name]) for name in names]


class Snapshot:
    """What the holders held at one moment."""

    def __init__(self, holders: list[Holder]) -> None:
        self._kept = [(holder, holder.read()) for holder in holders]

    def changes(self, among: frozenset[str] | None = None) -> Iterator[tuple[str, Holder]]:
        """What holds something else now, by name; ``among``: of these names alone."""
        found: dict[str, Holder] = {}
        for holder, content in self._kept:
            if among is None or any(name.startswith(holder.path) for name in among):
                found |= dict.fromkeys(holder.changes(content), holder)
        yield from ((name, holder) for name, holder in found.items() if among is None or name in among)

    def restore(self) -> None:
        for holder, content in self._kept:
            if any(True for _ in holder.changes(content)):
                holder.put(content)


def is_users(made: type | types.FunctionType | Callable[..., Any]) -> bool:
    """Whether a class or a function is the user's own, or of a package that is not known here."""
    return _is_users_module(getattr(made, "__module__", None) or "")


def _is_users_module(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in _LIBRARIES and (top == "__main__" or top not in sys.stdlib_module_names) and top != "builtins"


def _may_be_looked_into(cls: type) -> bool:
    """Objects of torch and of the standard library (loggers, files, threads) lead everywhere and hold nobody's numbers;
    but for those that are made to hold others, and what answers for its own state."""
    top = cls.__module__.partition(".")[0]
    own = cls.__module__ in ("random", "numpy.random", "itertools") or issubclass(cls, _OF_PYTHON)
    return own or cls.__module__ == "argparse" or (top not in sys.stdlib_module_names and top not in ("torch", "numpy"))


def _words(code: types.CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_words, nested))


def _is_data(name: str, value: Any) -> bool:
    described = callable(value) or hasattr(type(value), "__get__") or isinstance(value, types.GetSetDescriptorType)
    return not described and not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl"

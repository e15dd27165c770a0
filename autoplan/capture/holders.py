"""One object that holds others, or a state of its own: what it holds now, what changed, and how to put it back."""

from __future__ import annotations

import collections
import copy
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autoplan.capture.containers import of_container

# What nn.Module keeps for itself, and what its RNNs and parametrizations do: torch's business, and "training" is not.
_BOOKS = (frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs", "_is_full_backward_hook"}) - {
    "training"
}
_LARGEST = 2**22  # bytes of a NumPy array whose numbers are compared
_STEPPING: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    itertools.repeat,
    itertools.chain,
    itertools.islice,
    type(iter([])),
    type(iter(())),
    type(iter(range(1))),
    type(iter({})),
    enumerate,
    zip,
    map,
)


@dataclass(frozen=True, slots=True)
class Holder:
    """``read`` copies what it holds: a dictionary by key, or anything that answers ``==``. ``write`` puts such a copy
    back, None where that cannot be done (an iterator). ``label``: how a member is named by its key; "" where the holder
    is named as a whole. ``draws``: where a generator of random numbers or an iterator stands."""

    path: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None
    label: Callable[[Any], str] | None = None
    draws: bool = False

    @staticmethod
    def of_global(name: str, known: dict[str, Any]) -> Holder:
        return Holder(f"the global {name}", lambda: [known.get(name)], lambda content: known.update({name: content[0]}))

    @staticmethod
    def of_cell(path: str, cell: types.CellType) -> Holder | None:
        def write(content: list[Any]) -> None:
            cell.cell_contents = content[0]

        try:
            _ = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            return None
        return Holder(path, lambda: [cell.cell_contents], write)

    @staticmethod
    def of_buffers(path: str, module: nn.Module) -> Holder:
        """The buffers that a module has: what they hold is in the graph, that there is a new one is not."""
        table = module._buffers

        def write(content: dict[str, Any]) -> None:
            for name in [name for name in table if name not in content]:
                del table[name]
            table.update(content)

        return Holder(path, lambda: dict(table), write, lambda name: f"{path}.{name}")

    @staticmethod
    def of_class(cls: type, names: set[str]) -> Holder:
        def write(content: dict[str, Any]) -> None:
            for name, value in content.items():
                setattr(cls, name, value)

        def read() -> dict[str, Any]:
            return {name: vars(cls)[name] for name in names if name in vars(cls)}

        return Holder(cls.__qualname__, read, write, lambda name: f"{cls.__qualname__}.{name}")

    def items(self) -> Iterator[tuple[str, Any]]:
        """The members by name."""
        content = self.read()
        if isinstance(content, dict):
            for key, value in content.items():
                yield (self.label(key) if self.label else self.path), value
        elif isinstance(content, list) and not self.draws:
            label = self.label or (lambda _: self.path)
            yield from ((label(index), value) for index, value in enumerate(content))
        elif isinstance(content, set):
            yield from ((self.path, value) for value in content)

    def changes(self, before: Any) -> Iterator[str]:
        """The names of what is not as ``before``."""
        now = self.read()
        if isinstance(now, dict) and isinstance(before, dict) and self.label:
            keys = dict.fromkeys((*before, *now))
            yield from (self.label(k) for k in keys if k not in now or k not in before or not _equal(now[k], before[k]))
        elif not _equal(now, before):
            yield self.path

    def put(self, content: Any) -> None:
        if self.write is not None:
            self.write(content)


def is_iterator(value: Any) -> bool:
    return isinstance(value, (*_STEPPING, types.GeneratorType))


def held(path: str, value: Any) -> Holder | None:
    """How ``value`` is read and put back; None for what holds nothing that can change, or cannot be told."""
    if isinstance(value, nn.Module):
        return of_object(path, value, _BOOKS)
    if isinstance(value, dict):
        return _of_dictionary(path, value)
    if isinstance(value, (list, collections.deque, set)):
        return _of_items(path, value)
    container = of_container(value)
    if container is not None:
        read, write = container
        return Holder(path, read, write, lambda key: f"{path}[{key!r}]")
    generator = _of_generator(path, value)
    if generator is not None:
        return generator
    if is_iterator(value):
        return Holder(path, lambda: _position(value), None, draws=True)
    if type(value).__module__ == "numpy" and hasattr(value, "nbytes") and hasattr(value, "tobytes"):
        return _of_array(path, value)
    if isinstance(value, (type, types.ModuleType)) or not (hasattr(value, "__dict__") or _slot_names(value)):
        return None
    return of_object(path, value, frozenset())


def _of_dictionary(path: str, value: dict[Any, Any]) -> Holder:
    def write(content: dict[Any, Any]) -> None:
        value.clear()
        value.update(content)

    return Holder(path, lambda: dict(value), write, lambda key: f"{path}[{key!r}]")


def _of_items(path: str, value: Any) -> Holder:
    def write(content: Any) -> None:
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)

    def read() -> Any:
        return set(value) if isinstance(value, set) else list(value)

    return Holder(path, read, write, lambda index: f"{path}[{index}]")


def of_object(path: str, value: Any, books: frozenset[str]) -> Holder:
    attributes, slots = getattr(value, "__dict__", {}), _slot_names(value)
    of_torch = isinstance(value, nn.Module) and type(value).__module__.startswith("torch.")

    def users(name: str) -> bool:
        return name not in books and not name.startswith("_autoplan") and not (of_torch and name.startswith("_"))

    def read() -> dict[str, Any]:
        in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        return {name: item for name, item in attributes.items() if users(name)} | in_slots

    def write(content: dict[str, Any]) -> None:
        for name in [name for name in attributes if users(name) and name not in content]:
            del attributes[name]
        attributes.update({name: item for name, item in content.items() if name not in slots})
        for name in slots:
            if name in content:
                object.__setattr__(value, name, content[name])

    return Holder(path, read, write, lambda name: f"{path}.{name}")


def _slot_names(value: Any) -> list[str]:
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _of_array(path: str, value: Any) -> Holder | None:
    if value.nbytes > _LARGEST or value.ndim == 0 or value.dtype.hasobject:
        return None

    def write(content: tuple[Any, bytes]) -> None:
        value[...] = content[0]

    return Holder(path, lambda: (value.copy(), value.tobytes()), write)


def _of_generator(path: str, value: Any) -> Holder | None:
    """Python's and NumPy's generators of random numbers."""
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        return Holder(path, value.getstate, value.setstate, draws=True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return Holder(path, value.get_state, value.set_state, draws=True)
    if numpy is None:
        return None
    source = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if isinstance(source, numpy.random.BitGenerator):
        return Holder(path, lambda: copy.deepcopy(source.state), lambda s: setattr(source, "state", s), draws=True)
    return None


def global_generators() -> list[Holder]:
    """Python's own generator, and NumPy's where NumPy is there."""
    found = [Holder("Python's random numbers", random.getstate, random.setstate, draws=True)]
    if (numpy := sys.modules.get("numpy")) is not None:
        own = numpy.random.mtrand._rand
        found.append(Holder("NumPy's random numbers", own.get_state, own.set_state, draws=True))
    return found


def _position(iterator: Any) -> Any:
    """Where an iterator stands."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, {k: v for k, v in frame.f_locals.items() if _is_number(v)})
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    try:
        _, *reduced = iterator.__reduce__()
    except (TypeError, AttributeError):
        return None
    return [_stand(item) for item in reduced]


def _stand(item: Any) -> Any:
    if is_iterator(item):
        return _position(item)
    if isinstance(item, tuple):
        return [_stand(each) for each in item]
    return item if _is_number(item) else len(item) if hasattr(item, "__len__") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool))


def _equal(value: Any, other: Any) -> bool:
    """Equal as far as that is safe to ask: torch rebuilds containers while it traces, tensors answer with tensors."""
    if value is other:
        return True
    if type(value) is not type(other) or isinstance(value, Tensor):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(item, other[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, float):
        return value == other or (value != value and other != other)
    if hasattr(value, "tobytes"):
        return bool(value.tobytes() == other.tobytes())
    return isinstance(value, (str, int, complex, bytes, set, frozenset)) and bool(value == other)

"""Blocks of a model that nothing tells apart but their place: children of a ModuleList or a Sequential.

Two children are alike when they are of one class all the way down; every attribute of every module in them is equal,
hooks and modes included; parameters and buffers have the same shapes, strides, dtypes, devices and gradients, and are
tied among each other in the same way. A tensor or a module that is used outside its child rules the child out.
What may differ is a whole number that counts the children (transformers' ``layer_idx``): it is a *counter*, and while
the forward is traced an :class:`Index` stands in its place, which fails when anything asks for its value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

FEWEST = 4  # that are worth it: three of them are traced
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, range)
_BOOKS = ("_parameters", "_buffers", "_modules")

Key = tuple[str, str]
"""(path in the child, attribute)"""


class Unalike(Exception):
    """What was taken to be alike is not, or cannot be shown to be."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One child: ``path`` in the model, ``kind`` the index of its kind, ``last`` of its container."""

    path: str
    module: nn.Module
    kind: int
    last: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Children in the order of the model, of kinds with at least :data:`FEWEST` each; and their counters."""

    members: tuple[Member, ...]
    counters: tuple[tuple[nn.Module, str], ...]


class Index:
    """Stands for a counter while tracing: it may be passed on, and compared by ``is``. Its value is not there."""

    __slots__ = ("_noted",)

    def __init__(self, noted: Callable[[str], None]) -> None:
        self._noted = noted

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance answers as for the whole number that it stands for
        return int


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Index, *others: Any) -> Any:
        self._noted(f"a block asks for its place in the model ({name})")
        raise Unalike(name)

    return refuse


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "complex", "index", "str", "repr", "format"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rlshift", "rrshift", "rand", "ror"),
    *("rxor", "neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "getattr"),
):
    setattr(Index, f"__{_name}__", _refusing(_name))


def find_alike(model: nn.Module) -> Alike:
    """The outermost children that are alike."""
    uses = _Uses(model)
    members: list[Member] = []
    counters: list[tuple[nn.Module, str]] = []
    kinds = 0
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        children = {f"{path}.{name}".lstrip("."): child for name, child in module._modules.items() if child is not None}
        grouped: set[str] = set()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) >= FEWEST:
            for group, counted in _groups(children, uses):
                for place in group:
                    last = place == next(reversed(children))
                    members.append(Member(path=place, module=children[place], kind=kinds, last=last))
                    counters += [(children[place].get_submodule(inner), name) for inner, name in counted]
                grouped |= set(group)
                kinds += 1
        waiting += [(place, child) for place, child in reversed(children.items()) if place not in grouped]
    return Alike(members=tuple(members), counters=tuple(counters))


class _Uses:
    """How often each module, parameter and buffer stands in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._count = Counter(id(item) for item in _holdings(model))

    def is_closed(self, child: nn.Module) -> bool:
        """Whether what the child holds is held nowhere else."""
        inside = Counter(id(item) for item in _holdings(child))
        return all(self._count[item] == count for item, count in inside.items())


def _holdings(model: nn.Module) -> Iterator[nn.Module | Tensor]:
    for _, module in model.named_modules(remove_duplicate=False):
        yield module
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _groups(children: Mapping[str, nn.Module], uses: _Uses) -> Iterator[tuple[list[str], list[Key]]]:
    """Children that are alike, with their counters."""
    fit = {path: child for path, child in children.items() if _is_plain(child) and uses.is_closed(child)}
    if len(fit) < FEWEST:
        return
    entries = {path: _entries(child) for path, child in fit.items()}
    counters = _counters(entries, {path: place for place, path in enumerate(children)})
    found: list[list[str]] = []
    for path, own in entries.items():
        home = next((group for group in found if _is_alike(entries[group[0]], own, counters)), None)
        if home is None:
            found.append([path])
        else:
            home.append(path)
    for group in found:
        if len(group) >= FEWEST:
            yield group, [key for key in counters if key in entries[group[0]]]


def _is_plain(child: nn.Module) -> bool:
    """Whether the child is called by its class's Python forward, and holds modules: what is less is quickly traced."""
    forward = inspect.getattr_static(type(child), "forward", None)
    return bool(child._modules) and isinstance(forward, types.FunctionType) and "forward" not in child.__dict__


def _entries(child: nn.Module) -> dict[Key, Any]:
    """Everything that tells a child from another, in order."""
    entries: dict[Key, Any] = {}
    order: dict[int, int] = {}
    for path, module in child.named_modules():
        entries[path, "class"] = type(module)
        entries[path, "children"] = tuple(module._modules)
        for book in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[book].items():
                entries[path, f"{book} {name}"] = _tensor_facts(tensor, order)
        for name, value in module.__dict__.items():
            if name not in _BOOKS:
                entries[path, name] = value
    return entries


def _tensor_facts(tensor: Tensor | None, order: dict[int, int]) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    tied = order.setdefault(id(tensor), len(order))
    layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    return (type(tensor), *layout, tied)


def _counters(entries: Mapping[str, dict[Key, Any]], place: Mapping[str, int]) -> list[Key]:
    """Whole numbers that are the child's place in the container plus a constant, in every child that has them."""
    offsets: dict[Key, set[int]] = {}
    holders: Counter[Key] = Counter()
    ruled_out: set[Key] = set()
    for path, own in entries.items():
        for key, value in own.items():
            if type(value) is int:
                offsets.setdefault(key, set()).add(value - place[path])
                holders[key] += 1
            else:
                ruled_out.add(key)
    return [key for key, found in offsets.items() if len(found) == 1 and holders[key] > 1 and key not in ruled_out]


def _is_alike(one: dict[Key, Any], other: dict[Key, Any], counters: list[Key]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(_same(value, other[key]) or key in counters for key, value in one.items())


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes are sure to act alike: plain values by value, all else by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (set, frozenset)):
        return all(isinstance(item, _PLAIN) for item in one) and one == other
    if isinstance(one, functools.partial):
        return _same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if dataclasses.is_dataclass(one) or _is_config(one):
        return _same(vars(one), vars(other)) if hasattr(one, "__dict__") else False
    return False


def _is_config(value: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PreTrainedConfig)


def is_constant(value: Any) -> bool:
    """Whether a value that is no tensor can be handed to a block without the block changing it."""
    functions = (type, types.FunctionType, types.BuiltinFunctionType, Index)
    return type(value) in functions or isinstance(value, _PLAIN) or _is_config(value)

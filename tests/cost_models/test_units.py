"""Every public number of the cost models says what it is counted in."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator

import pytest

from autoplan import cost_models

UNITS = ("second", "byte", "flop", "share", "element", "token", "micro-batch", "times")


def numbers() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public functions of the room, and properties of its public classes, that return numbers."""
    for info in pkgutil.iter_modules(cost_models.__path__):
        module = importlib.import_module(f"autoplan.cost_models.{info.name}")
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(value) and "float" in str(inspect.signature(value).return_annotation):
                yield f"{info.name}.{name}", value
            if inspect.isclass(value):
                for attribute, member in vars(value).items():
                    getter = member.fget if isinstance(member, property) else None
                    if getter and "float" in str(inspect.signature(getter).return_annotation):
                        yield f"{info.name}.{name}.{attribute}", getter


NUMBERS = dict(numbers())


def test_there_are_many() -> None:
    assert len(NUMBERS) > 30


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_names_its_unit(name: str) -> None:
    """In its docstring, in its name (``_s``, ``_bytes``: which the docstring must not contradict), or in both."""
    said = (NUMBERS[name].__doc__ or "").lower()
    assert said or name.rpartition(".")[2].endswith(("_s", "_bytes", "fraction", "flops")), "no docstring"
    if said:
        assert any(unit in said for unit in UNITS), said

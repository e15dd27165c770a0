"""First values for models built without any: the same whatever the plan, and never more than a module of them at once.

A module's parameters are drawn on the CPU, from a seed of its own: a hash of the run's seed and of the module's name.
So it matters not which rank draws them, in which order, or which others it draws. A rank draws the modules of which it
stores something, keeps what it stores, and drops the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoplan.errors import StrategyError
from autoplan.runtime.stored import Part


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside, modules are built with their parameters on meta and their buffers, which no file may hold, as ever."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Initialised:
    """A :class:`autoplan.runtime.stored.Source` whose values are drawn when they are read."""

    def __init__(self, model: nn.Module, *, seed: int, init: Callable[[nn.Module], None] | None) -> None:
        self._model, self._seed = model, seed
        self._init = init or getattr(model, "_init_weights", None)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._buffers = {name: b for name, b in model.named_buffers() if name in self.shapes}

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the pieces of ``parts``; buffers have their values already."""
        owners: dict[str, list[str]] = {}
        for name, part in parts.items():
            if name not in self._buffers and part.pieces:
                owners.setdefault(name.rpartition(".")[0], []).append(name)
        for path, names in owners.items():
            module = self._model.get_submodule(path)
            with self._drawn(path, module) as values:
                for name in names:
                    for piece in parts[name].pieces:
                        piece.view.copy_(values[name.rpartition(".")[2]].detach()[piece.index])

    @contextmanager
    def _drawn(self, path: str, module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
        """The module's own parameters with values, for a while; then it has those that it had."""
        before = dict(module._parameters)
        own = {name: p for name, p in before.items() if p is not None}
        module._parameters.update({n: nn.Parameter(torch.empty_like(p, device="cpu")) for n, p in own.items()})
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(_seed(self._seed, path))
                self._initialiser(path, module)(module)
            yield {name: module._parameters[name] for name in own}  # type: ignore[misc]
        finally:
            module._parameters.update(before)

    def _initialiser(self, path: str, module: nn.Module) -> Callable[[Any], Any]:
        if self._init is not None:
            return self._init
        if hasattr(module, "reset_parameters"):
            return lambda built: built.reset_parameters()
        raise StrategyError(
            f"`{path or type(module).__name__}` ({type(module).__name__}) has parameters and no reset_parameters()",
            where="program.initialise",
            legal="modules with reset_parameters(), models of transformers, or an init of yours",
            attempt="program.initialise(model, seed=0, init=fill), where fill(module) sets one module's parameters",
        )


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed},{path}".encode()).digest()[:7], "big")

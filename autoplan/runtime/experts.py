"""Experts beside all else: their gradients are summed over the ranks that hold the same ones, not over all data ranks.

The expert axis lies inside the data axis: ``expert`` neighbours hold a run of every layer's experts each, and
data / expert such groups hold the same. So a rank's parameters are two sets, each with a data axis of its own, under
one :class:`GradientSync`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from autoplan.runtime.collectives import Mesh
from autoplan.runtime.data_parallel import GradientSync
from autoplan.runtime.gathered import gradient_sync


class Apart(GradientSync):
    """``experts`` for the parameters it has, ``others`` for the rest."""

    def __init__(self, others: GradientSync, experts: GradientSync, names: tuple[str, ...], mesh: Mesh) -> None:
        self.mesh = mesh
        self._others, self._experts = others, experts
        self.working = _merged(names, others.working, experts.working)
        self.parameters = _merged(names, others.parameters, experts.parameters)
        self._later: frozenset[str] = frozenset()

    @property
    def read(self) -> Mapping[str, nn.Parameter]:
        return _merged(tuple(self.working), self._others.read, self._experts.read)

    @property
    def later(self) -> frozenset[str]:
        return self._later

    @later.setter
    def later(self, names: frozenset[str]) -> None:
        self._later = self._others.later = self._experts.later = names

    def around_forward(self) -> AbstractContextManager[None]:
        return self._around()

    @contextmanager
    def _around(self) -> Iterator[None]:
        with self._others.around_forward(), self._experts.around_forward():
            yield

    def begin_step(self) -> None:
        for part in (self._others, self._experts):
            part.begin_step()

    def refresh(self) -> None:
        for part in (self._others, self._experts):
            part.refresh()

    def before_backward(self, adds: frozenset[str], last: frozenset[str]) -> None:
        for part in (self._others, self._experts):
            part.before_backward(adds, last)

    def send_rest(self) -> None:
        for part in (self._others, self._experts):
            part.send_rest()

    def finish_step(self) -> None:
        for part in (self._others, self._experts):
            part.finish_step()

    def extent(self, name: str) -> range | None:
        return self._of(name).extent(name)

    def whole(self, name: str) -> Tensor:
        return self._of(name).whole(name)

    def whole_gradient(self, name: str) -> Tensor:
        return self._of(name).whole_gradient(name)

    def counts_here(self, name: str) -> bool:
        return self._of(name).counts_here(name)

    def _of(self, name: str) -> GradientSync:
        return self._experts if name in self._experts.working else self._others


def apart(
    working: Mapping[str, nn.Parameter],
    mesh: Mesh,
    tied: Mapping[str, tuple[int, ...]],
    summands: tuple[str, ...],
    experts: frozenset[str],
    *,
    masters: bool = False,
) -> GradientSync:
    """The data axis of ``working``, with those that ``experts`` names over the copies of this rank's experts."""
    others = {name: parameter for name, parameter in working.items() if name not in experts}
    own = {name: parameter for name, parameter in working.items() if name in experts}
    if not own:
        return gradient_sync(working, mesh, tied, summands, masters=masters)
    return Apart(
        gradient_sync(others, mesh, {n: held for n, held in tied.items() if n in others}, summands, masters=masters),
        gradient_sync(own, mesh.of_experts(), {n: held for n, held in tied.items() if n in own}, masters=masters),
        tuple(working),
        mesh,
    )


def _merged(
    names: tuple[str, ...], one: Mapping[str, nn.Parameter], other: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    return {name: one[name] if name in one else other[name] for name in names}

"""Blocks that are alike, traced a few times instead of every time.

The model is traced whole, by its own forward, but for the inside of most blocks that are alike (:mod:`.alike`). The
first two calls of a kind of block with a kind of arguments, and the call of a container's last child, run as ever,
between two marks in the graph; every other call becomes one ``block`` node that returns tensors like those that its
example returned::

    enter([x, mask], 0); ...; leave([y], 0)         layer 0, as it is
    enter([y, mask], 1); ...; leave([z], 1)         layer 1, as it is
    block([z, mask], 2) -> [w]                      layer 2, whose inside is layer 1's
    ...

So what a model does *between* its blocks, with whatever index, is traced and never assumed (T5's position bias, skip
connections, masks that alternate). :mod:`.unfold` proves that the traced examples are the same graph, and writes it in
place of the block nodes. :class:`Unalike` is raised where that is not sure; then the model is traced block by block.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.utils import _pytree as pytree

from autoplan.capture.alike import Alike, Index, Member, Unalike, is_constant
from autoplan.capture.checkpointing import region
from autoplan.capture.unchanged import Attributes, hollow

_PLACE = "_autoplan_place"
_EXAMPLES = 2  # of a kind of call, traced before any is folded
SPARE = 3  # blocks of a kind at hand for examples: the first is often called a little otherwise than the others

_LIBRARY = torch.library.Library("autoplan_capture", "DEF")
_LIBRARY.define("enter(Tensor[] inputs, int call) -> ()")
_LIBRARY.define("leave(Tensor[] outputs, int call) -> ()")
_LIBRARY.define("block(Tensor[] inputs, int call) -> Tensor[]")
_LIBRARY.define("block_of_one(Tensor[] inputs, int call) -> Tensor")  # the usual case, at half the price
ENTER = torch.ops.autoplan_capture.enter.default
LEAVE = torch.ops.autoplan_capture.leave.default
BLOCK = torch.ops.autoplan_capture.block.default
BLOCK_OF_ONE = torch.ops.autoplan_capture.block_of_one.default
for _mark in (ENTER, LEAVE, BLOCK, BLOCK_OF_ONE):
    torch.fx.node.has_side_effect(_mark)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a block. ``key`` tells kinds of calls apart; ``folded``: a ``block`` node stands for it.

    ``outputs``: the new tensors of an example, ``returned``: what it gave back, tensors as ("input" or "output", k).
    """

    path: str
    key: Any
    folded: bool
    example: Call | None = None
    outputs: list[Tensor] = field(default_factory=list)
    returned: tuple[Any, Any] = ((), None)


@dataclass(slots=True, kw_only=True)
class Folding:
    """The calls of one trace, in their order. ``reason``: why nothing may be folded, "" while nothing is known.

    ``hollow``: paths of the blocks that are left out of the trace with all that they hold, since no call of theirs is
    expected to run; ``starved``: one had to, or was looked into. ``insides``: the modules in each block.
    """

    alike: Alike
    hollow: frozenset[str]
    insides: list[list[nn.Module]]
    calls: list[Call] = field(default_factory=list)
    reason: str = ""
    starved: bool = False
    _in_forward: bool = False
    _in_block: bool = False
    _attributes: list[Attributes] = field(default_factory=list)

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Around the model's forward. An earlier trace that failed is forgotten."""
        self.calls.clear()
        self._attributes = [Attributes(modules) for modules in self.insides]
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def refuse(self, reason: str) -> None:
        """Remember why not, whatever becomes of the exception on its way out."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Raise Unalike where something spoke against folding."""
        if self.reason:
            raise Unalike(self.reason)

    def call(self, original: Callable[..., Any], module: nn.Module, place: int, args: Any, kwargs: Any) -> Any:
        """A block's forward, run or folded."""
        if self._in_block:  # a forward that calls its parent class's
            return original(module, *args, **kwargs)
        member = self.alike.members[place]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors, described = _describe(leaves)
        if described is None or not torch.is_grad_enabled():  # no_grad is another graph: its operands are detached
            self._feed(member)
            return original(module, *args, **kwargs)
        key = (member.kind, structure, described, _modes())
        earlier = [call for call in self.calls if call.key == key]
        if any(call.path == member.path for call in self.calls):
            raise self._unalike(f"{member.path} is called more than once")
        if self._attributes[place].have_changed():
            raise self._unalike(f"attributes of {member.path} are set between calls")
        examples = [call for call in earlier if not call.folded]
        folded = len(examples) >= _EXAMPLES and not member.last
        call = Call(path=member.path, key=key, folded=folded, example=examples[0] if folded else None)
        self.calls.append(call)
        if folded:
            return self._fold(call, tensors)
        self._feed(member)
        return self._run(call, place, tensors, lambda: original(module, *args, **kwargs), (args, kwargs))

    @contextlib.contextmanager
    def hollowed(self) -> Iterator[None]:
        """While inside, the model has no trace of what its hollow blocks hold."""
        modules = [member.module for member in self.alike.members if member.path in self.hollow]
        with hollow(modules, self._asked):
            yield

    def _asked(self) -> None:
        if self._in_forward:
            self.starved = True
            raise self._unalike("the model looks into blocks that it does not call")

    def _feed(self, member: Member) -> None:
        """Before a block runs for real: refuse if it was left out."""
        if member.path in self.hollow:
            self.starved = True
            raise self._unalike(f"{member.path} is called in another way than its like")

    def _fold(self, call: Call, tensors: list[Tensor]) -> Any:
        example = call.example
        assert example is not None
        number = len(self.calls) - 1
        made = [BLOCK_OF_ONE(tensors, number)] if len(example.outputs) == 1 else BLOCK(tensors, number)
        found = {"input": tensors, "output": made}
        leaves, structure = example.returned
        return pytree.tree_unflatten([found[where][k] if where in found else k for where, k in leaves], structure)

    def _run(self, call: Call, place: int, tensors: list[Tensor], run: Callable[[], Any], given: Any) -> Any:
        number = len(self.calls) - 1
        versions = [tensor._version for tensor in tensors]
        leaves, structure = pytree.tree_flatten(given)
        ENTER(tensors, number)
        self._in_block = True
        try:
            output = run()
        finally:
            self._in_block = False
        after, structure_after = pytree.tree_flatten(given)
        if structure_after != structure or any(mine is not other for mine, other in zip(leaves, after, strict=True)):
            raise self._unalike(f"{call.path} changes what it is called with")
        if versions != [tensor._version for tensor in tensors]:
            raise self._unalike(f"{call.path} writes into its inputs")
        if self._attributes[place].have_changed():
            raise self._unalike(f"{call.path} changes its attributes")
        call.returned = self._sort_outputs(call, tensors, output)
        LEAVE(call.outputs, number)
        return output

    def _sort_outputs(self, call: Call, tensors: list[Tensor], output: Any) -> tuple[Any, Any]:
        leaves, structure = pytree.tree_flatten(output)
        inputs = {id(tensor): slot for slot, tensor in enumerate(tensors)}
        made: dict[int, int] = {}
        sorted_leaves: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not is_constant(leaf):
                    raise self._unalike(f"{call.path} returns a {type(leaf).__name__}")
                sorted_leaves.append(("constant", leaf))
            elif id(leaf) in inputs:
                sorted_leaves.append(("input", inputs[id(leaf)]))
            else:
                if id(leaf) not in made:
                    made[id(leaf)] = len(made)
                    call.outputs.append(leaf)
                sorted_leaves.append(("output", made[id(leaf)]))
        return tuple(sorted_leaves), structure

    def _unalike(self, reason: str) -> Unalike:
        self.refuse(reason)
        return Unalike(reason)


_ACTIVE: ContextVar[Folding] = ContextVar("autoplan_folding")


@contextlib.contextmanager
def folded(alike: Alike, *, spare: int) -> Iterator[Folding]:
    """While inside, calls of blocks that are alike are folded. Leaves the model as it was.

    Of each kind the first ``spare`` blocks and a container's last are traced with all that they hold.
    """
    insides = [[*member.module.modules()] for member in alike.members]
    folding = Folding(alike=alike, hollow=_hollow(alike, spare), insides=insides)
    with contextlib.ExitStack() as stack:
        for place, member in enumerate(folding.alike.members):
            _set(stack, member.module, _PLACE, place)
            # the module's own: a class may ask whether its forward is still the one that it made (checkpointing layers)
            _set(stack, member.module, "forward", MethodType(_intercepted(type(member.module).forward), member.module))
        for module, name in folding.alike.counters:
            _set(stack, module, name, Index(folding.refuse))
        token = _ACTIVE.set(folding)
        stack.callback(_ACTIVE.reset, token)
        yield folding


def _hollow(alike: Alike, spare: int) -> frozenset[str]:
    seen: Counter[int] = Counter()
    hollow = set()
    for member in alike.members:
        seen[member.kind] += 1
        if seen[member.kind] > spare and not member.last:
            hollow.add(member.path)
    return frozenset(hollow)


def _set(stack: contextlib.ExitStack, module: nn.Module, name: str, value: Any) -> None:
    attributes = module.__dict__
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = value


def _intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        place = self.__dict__.get(_PLACE)
        folding = _ACTIVE.get(None)
        if place is None or folding is None:
            return original(self, *args, **kwargs)
        return folding.call(original, self, place, args, kwargs)

    return around


def _describe(leaves: list[Any]) -> tuple[list[Tensor], tuple[Any, ...] | None]:
    """The distinct tensors among a call's leaves, and what tells calls apart; None where that cannot be said."""
    tensors: list[Tensor] = []
    slots: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in slots:
                slots[id(leaf)] = len(tensors)
                tensors.append(leaf)
            described.append((slots[id(leaf)], *layout(leaf)))
        elif isinstance(leaf, SymInt):
            described.append(("size", size_key(leaf)))
        elif type(leaf) is Index:
            described.append("index")
        elif is_constant(leaf):
            described.append((type(leaf), leaf if type(leaf).__hash__ is not None else id(leaf)))
        else:
            return tensors, None
    return tensors, tuple(described)


def _modes() -> tuple[Any, ...]:
    """What of the surroundings a block's operators may depend on."""
    kinds = ("cpu", "cuda")
    cast = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (region(), *cast)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """All that a graph can depend on of a tensor under trace."""
    sizes = tuple(map(size_key, tensor.shape))
    strides = tuple(map(size_key, tensor.stride())) if tensor.layout is torch.strided else None
    return (type(tensor), tensor.dtype, tensor.device, sizes, strides, tensor.requires_grad)


def size_key(size: Any) -> Any:
    """A size as a plain number or its expression; two are equal only if they always are."""
    return size.node.expr if isinstance(size, SymInt) else size


def _marked(tensors: list[Tensor], call: int) -> None:
    """Marks compute nothing."""


def _imitated(tensors: list[Tensor], call: int) -> list[Tensor]:
    example = _ACTIVE.get().calls[call].example
    assert example is not None
    return [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        for tensor in example.outputs
    ]


def _imitated_one(tensors: list[Tensor], call: int) -> Tensor:
    return _imitated(tensors, call)[0]


def _no_gradient(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a folded block is never run")


torch.library.register_fake("autoplan_capture::enter", _marked)
torch.library.register_fake("autoplan_capture::leave", _marked)
torch.library.register_fake("autoplan_capture::block", _imitated)
torch.library.register_fake("autoplan_capture::block_of_one", _imitated_one)
torch.library.register_autograd("autoplan_capture::block", _no_gradient)
torch.library.register_autograd("autoplan_capture::block_of_one", _no_gradient)

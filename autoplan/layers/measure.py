"""Run one layer on the meta device and see what it computes, moves and keeps for the backward.

No mathematics is executed: meta tensors have shapes and strides only. Saved bytes are what autograd's saved-tensor
hooks see, each storage once, at the operator that made it; views own nothing; the layer's own inputs, parameters and
buffers are not its to count (an input that is saved is reported, and counted where it was made).

Three operators run as a GPU's kernels do, not as the meta decomposition would: attention keeps query, key, value,
output and a float32 log-sum-exp a row (FlashAttention-2, Dao 2023, algorithm 1; the memory-efficient kernel the same),
and returns a tensor laid out as the query is, as those kernels do; dropout keeps one byte an element; rms_norm
keeps its input and one number a row.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from autoplan.capture.shapes import size_at
from autoplan.layers.facts import Facts, tensors
from autoplan.layers.formulas import Operand, Work, work_of
from autoplan.layers.operators import ATTENTIONS, operator_name


@dataclass(slots=True, kw_only=True)
class Sample:
    """One operator in one run. Bytes are of this run's batch; ``owns`` the storages that it made."""

    work: Work
    dtype: torch.dtype | None
    read_bytes: float
    written_bytes: float
    parameter_bytes: float
    elements: int
    makes_new: bool
    needs_backward: bool
    saved_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layer's samples in graph order.

    ``owner[i]``: who made the storage of node i's value: a node's index, -1 - j for boundary input j, or None (a
    parameter, a number). ``storage_bytes[i]`` is that storage's size, ``is_saved[i]`` whether it is counted.
    ``saved_inputs``: indices of the boundary inputs whose storage the backward keeps.
    """

    samples: tuple[Sample, ...]
    owner: tuple[int | None, ...]
    storage_bytes: tuple[float, ...]
    is_saved: tuple[bool, ...]
    saved_inputs: frozenset[int]


@dataclass(slots=True)
class _Memory:
    """Who made each storage, and which of them are kept. Holds the storages, so that no address is used twice."""

    made_by: dict[int, int | None] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)

    def claim(self, tensor: Tensor, maker: int | None) -> bool:
        """Record ``maker`` of the tensor's storage; False if it was made before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.made_by:
            return False
        self.made_by[storage._cdata] = maker
        self.alive.append(storage)
        return True


def run_layer(facts: Facts, nodes: Sequence[Node], boundary: Sequence[Node], *, batch: int) -> Run:
    """Run ``nodes`` on meta at ``batch`` samples (a static trace runs at its own batch, whatever is said)."""
    runner = _Runner(facts, batch)
    for index, source in enumerate(boundary):
        runner.feed(source, -1 - index)
    samples = tuple(runner.step(index, node) for index, node in enumerate(nodes))
    return runner.result(samples, nodes)


class _Runner:
    def __init__(self, facts: Facts, batch: int) -> None:
        self._facts = facts
        self._batch = batch
        self._memory = _Memory()
        self._values: dict[Node, Any] = {}
        self._constants: set[int] = set()

    def feed(self, source: Node, label: int) -> None:
        """Give a boundary input: a tensor of its shape, that wants a gradient where one flows."""
        module = source.graph.owning_module
        if source.op == "get_attr" and module is not None:
            value = _attribute(module, str(source.target))
            value = value.detach().to("meta") if isinstance(value, Tensor) else value
            self._values[source] = value
            for tensor in tensors(value):
                self._memory.claim(tensor, None)
            return
        value = self._imitate(source.meta.get("val"), wants_gradient=source in self._facts.differentiable)
        self._values[source] = value
        for tensor in tensors(value):
            # The batch's own tensors live anyway; what another layer made is its to count.
            self._memory.claim(tensor, None if source.op == "placeholder" else label)

    def step(self, index: int, node: Node) -> Sample:
        arguments, keywords = self._arguments(node)
        read = [(source, tensor) for source in node.all_input_nodes for tensor in tensors(self._values.get(source))]
        known = set(self._memory.saved)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save(index), _unpack):
                value = _call(node, arguments, keywords)
            value = map_aggregate(value, _to_meta)
        except (RuntimeError, NotImplementedError, TypeError):
            value = self._imagine(node, index)
        self._values[node] = value
        outputs = list(tensors(value))
        new = [tensor for tensor in outputs if self._memory.claim(tensor, index)]
        hidden = sum(
            size
            for storage, size in self._memory.saved.items()
            if storage not in known
            and storage not in {t.untyped_storage()._cdata for t in outputs}
            and self._memory.made_by[storage] == index
        )
        return self._sample(node, arguments, keywords, read, outputs, new, hidden)

    def result(self, samples: tuple[Sample, ...], nodes: Sequence[Node]) -> Run:
        memory = self._memory
        for key, size in memory.saved.items():
            maker = memory.made_by[key]
            if maker is not None and maker >= 0:
                samples[maker].saved_bytes += size
        owner: list[int | None] = []
        sizes: list[float] = []
        saved: list[bool] = []
        for node in nodes:
            first = next(tensors(self._values[node]), None)
            storage = first.untyped_storage() if first is not None else None
            owner.append(memory.made_by[storage._cdata] if storage is not None else None)
            sizes.append(float(storage.nbytes()) if storage is not None else 0.0)
            saved.append(storage is not None and storage._cdata in memory.saved)
        makers = {memory.made_by[key] for key in memory.saved}
        return Run(
            samples=samples,
            owner=tuple(owner),
            storage_bytes=tuple(sizes),
            is_saved=tuple(saved),
            saved_inputs=frozenset(-1 - maker for maker in makers if maker is not None and maker < 0),
        )

    # ------------------------------------------------------------------------------------------ values

    def _save(self, index: int) -> Callable[[Tensor], Tensor]:
        def pack(tensor: Tensor) -> Tensor:
            self._memory.claim(tensor, index)
            storage = tensor.untyped_storage()
            self._memory.saved[storage._cdata] = float(storage.nbytes())
            return tensor

        return pack

    def _arguments(self, node: Node) -> tuple[list[Any], dict[str, Any]]:
        arguments, keywords = map_arg((node.args, node.kwargs), self._value)
        on_meta = map_aggregate(
            (arguments, keywords), lambda item: torch.device("meta") if isinstance(item, torch.device) else item
        )
        return list(on_meta[0]), dict(on_meta[1])

    def _value(self, node: Node) -> Any:
        if node not in self._values:
            parameter = self._facts.parameters[node]
            value = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            self._values[node] = value.requires_grad_(parameter.requires_grad)
            self._memory.claim(value, None)
            self._constants.add(id(value))
        return self._values[node]

    def _imitate(self, value: Any, *, wants_gradient: bool) -> Any:
        if isinstance(value, Tensor):
            sizes = [size_at(size, self._batch) for size in value.shape]
            strides = [size_at(stride, self._batch) for stride in value.stride()]
            made = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
            differentiable = wants_gradient and (made.is_floating_point() or made.is_complex())
            return _Given.apply(made.new_empty(0, requires_grad=True), made) if differentiable else made
        if isinstance(value, (tuple, list)):
            return type(value)(self._imitate(item, wants_gradient=wants_gradient) for item in value)
        if isinstance(value, torch.SymInt):
            return size_at(value, self._batch)
        if isinstance(value, torch.SymFloat):
            return 1.0
        if isinstance(value, torch.SymBool):
            return True
        return value

    def _imagine(self, node: Node, index: int) -> Any:
        """The value of an operator that does not run on meta: by its metadata; it is taken to keep its operands."""
        wants = node in self._facts.differentiable
        if wants:
            pack = self._save(index)
            for source in node.all_input_nodes:
                for tensor in tensors(self._values.get(source)):
                    pack(tensor)
        return self._imitate(node.meta.get("val"), wants_gradient=wants)

    # ------------------------------------------------------------------------------------------ samples

    def _sample(
        self,
        node: Node,
        arguments: list[Any],
        keywords: dict[str, Any],
        read: list[tuple[Node, Tensor]],
        outputs: list[Tensor],
        new: list[Tensor],
        hidden: float,
    ) -> Sample:
        name = operator_name(node.target)
        output = Operand(tuple(outputs[0].shape)) if outputs else Operand(())
        work = work_of(name, [_operand(item) for item in _in_schema_order(node, arguments, keywords)], output)
        activations = [tensor for source, tensor in read if source not in self._facts.parameters]
        weights = [tensor for source, tensor in read if source in self._facts.parameters]
        in_place = bool(outputs) and not new and name.endswith("_")
        moves = bool(new) or in_place
        written = sum(map(touched_bytes, new)) + hidden + (touched_bytes(outputs[0]) if in_place else 0.0)
        gathers = name in ("embedding", "index", "gather", "index_select", "slice", "select")
        if gathers and moves:  # only the rows that are asked for are read
            indices = sum(touched_bytes(tensor) for tensor in activations if not tensor.is_floating_point())
            read_bytes, parameter_bytes = written + indices, 0.0
        else:
            read_bytes = sum(map(touched_bytes, activations)) if moves else 0.0
            parameter_bytes = sum(map(touched_bytes, weights)) if moves else 0.0
        floating = [tensor.dtype for tensor in (*activations, *weights, *outputs) if tensor.is_floating_point()]
        every = [tensor.dtype for tensor in (*outputs, *activations)]
        return Sample(
            work=work,
            dtype=next(iter(floating or every), None),
            read_bytes=float(read_bytes),
            written_bytes=float(written),
            parameter_bytes=float(parameter_bytes),
            elements=sum(tensor.numel() for tensor in (*outputs, *activations)),
            makes_new=moves,
            needs_backward=any(tensor.requires_grad for tensor in outputs),
        )


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: what an expanded dimension repeats is read once."""
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return int(distinct if tensor.numel() else 0) * tensor.element_size()


def _attribute(module: torch.nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(module)


def _to_meta(item: Any) -> Any:
    return item.to("meta") if isinstance(item, Tensor) and not item.is_meta else item


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _operand(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Operand(tuple(item.shape), item.requires_grad)
    if isinstance(item, (list, tuple)):
        return [_operand(each) for each in item]
    return item


def _in_schema_order(node: Node, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Any]:
    """Positional and keyword arguments in the schema's order, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return itertools.chain(arguments, keywords.values())
    missing = schema.arguments[len(arguments) :]
    return itertools.chain(arguments, (keywords.get(each.name, each.default_value) for each in missing))


# ---------------------------------------------------------------------------------------------- kernels


class _Given(torch.autograd.Function):
    """A tensor that came from elsewhere: no leaf (operators may work on it in place), a view of nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("runs on meta only to see what is kept")


class _FlashLike(torch.autograd.Function):
    """What a flash or memory-efficient attention kernel keeps and returns."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        order = sorted(range(query.dim()), key=query.stride, reverse=True)
        output = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)  # the kernels add: torch turns True and False into numbers
        ctx.save_for_backward(query, key, value, output, log_sum_exp, *((mask,) if mask is not None else ()))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("runs on meta only to see what is kept")


class _RmsNormLike(torch.autograd.Function):
    """What a fused rms_norm keeps: its input and the reciprocal of each row's root mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normed: int, weight: Tensor | None) -> Tensor:
        rows = x.new_empty(x.shape[: x.dim() - normed], dtype=torch.float32)
        ctx.save_for_backward(x, rows, *((weight,) if weight is not None else ()))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("runs on meta only to see what is kept")


def _call(node: Node, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    name = operator_name(node.target)
    if name in ATTENTIONS and name == "scaled_dot_product_attention":
        mask = arguments[3] if len(arguments) > 3 else keywords.get("attn_mask")
        return _FlashLike.apply(*arguments[:3], mask)
    if name == "dropout":
        probability, train = arguments[1], arguments[2] if len(arguments) > 2 else keywords.get("train", True)
        if train and probability:
            return torch.ops.aten.native_dropout.default(arguments[0], probability, True)[0]
        return arguments[0]
    if name == "rms_norm":
        x, shape, weight = (*arguments, None)[:3]
        return _RmsNormLike.apply(x, len(shape), weight)
    target = node.target
    assert callable(target)
    return target(*arguments, **keywords)

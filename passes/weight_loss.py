"""weight_loss: rewrite the loss so that parts of the batch add up to the whole.

Requires: a capture whose loss terms are known (:mod:`autoplan.capture.loss`).
Guarantees: the rewritten graph takes one more input a term, ``loss_total_k``, the sum of the term's weight over all
parts, and returns a contribution to the loss; over parts p of the batch (micro-batches x data ranks)

    loss(batch) = sum_p contribution(p, totals),    totals_k = sum_p weights_k(p),

and so for every gradient. A mean becomes a sum divided by its total, so that a part in which nothing counts
contributes 0 and not 0/0; where nothing counts in the whole batch the result is 0/0, as in a single process.

=========  ==================================  ====================================
term       weight of a part                    in the graph
=========  ==================================  ====================================
mean       elements, or targets that count     sum / total
sum        1 (not used)                        unchanged
constant   1                                   constant / total
total      the value of the node in this part  total, where the node was divided by
=========  ==================================  ====================================

A loss that is no sum of such terms (then the capture has a coupling) is left as it is and takes no totals: right for a
batch in one piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autoplan.capture.batch_losses import LOSSES, MEAN, SUM, counted_elements
from autoplan.capture.batch_memory import Memory, writes
from autoplan.capture.batch_state import Sizes, bound, short_name
from autoplan.capture.coupling import loss_node
from autoplan.capture.loss import Constant, Site, decompose
from autoplan.capture.types import Capture, InputSpec, LossTerm
from autoplan.errors import CaptureError

aten = torch.ops.aten
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLoss:
    """``graph_module``: the batch's placeholders, then ``loss_total_0..``; returns the contribution (0-dim).
    ``weights``: the batch's placeholders; returns a tuple with each term's weight (0-dim, float64)."""

    graph_module: GraphModule
    weights: GraphModule
    terms: tuple[LossTerm, ...]


def weight_loss(capture: Capture) -> WeightedLoss:
    """See the module. The captured graph is not changed; parameters and buffers stay the same objects."""
    found = decompose(capture.graph_module, capture.inputs)
    contribution = _contribution(capture.graph_module, found.sites, found.total_uses)
    weights = _weights(capture.graph_module, capture.inputs, capture.batch_size, found.sites)
    return WeightedLoss(graph_module=contribution, weights=weights, terms=tuple(site.term for site in found.sites))


# --- the contribution ----------------------------------------------------------------------------------------------


class _Writer:
    """Adds nodes in place of others, with their values' shapes and the user's source lines."""

    def __init__(self, graph: Graph, original: GraphModule) -> None:
        self.graph = graph
        values = [node.meta.get("val") for node in original.graph.nodes]
        self.fake = (
            next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
        )

    def call(self, target: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "torch_fn", "from_node"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        with self.fake:
            node.meta["val"] = target(*map_arg(args, _value), **map_arg(kwargs, _value))
        return node

    def number(self, size: Node, like: Node) -> Node:
        """A size as a float64 tensor. Its value is not computed here: that would fix the symbolic batch for good."""
        node = self.graph.call_function(aten.scalar_tensor.default, (size,), {"dtype": torch.float64})
        node.meta.update({key: value for key, value in like.meta.items() if key != "val"})
        node.meta["val"] = self.fake.from_tensor(torch.empty((), dtype=torch.float64))
        return node

    def cast(self, node: Node, dtype: torch.dtype, like: Node) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(aten.to.dtype, node, dtype, like=like)


def _value(node: Node) -> Any:
    return node.meta["val"]


def _contribution(
    original: GraphModule, sites: tuple[Site, ...], total_uses: tuple[tuple[Node, Node], ...]
) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(original.graph, copies)
    loss = copies[loss_node(original)]
    writer = _Writer(graph, original)
    totals = _add_totals(writer, len(sites), loss.meta["val"])
    output = graph.output(loss)
    copies[original.graph.output_node()] = output

    sources = {site.node: total for site, total in zip(sites, totals, strict=True) if site.term.reduction == "total"}
    replaced: dict[tuple[Node, Any], Node] = {}
    for user, argument in total_uses:
        with graph.inserting_before(copies[user]):
            replaced[user, argument] = _from_totals(writer, argument, user, sources, copies)
    for site, total in zip(sites, totals, strict=True):
        if site.term.reduction == "mean":
            _mean_to_sum(writer, copies[site.node], total)
        elif site.constant is not None:
            _divide_constant(writer, site.constant, total, copies, replaced)
    for (user, argument), node in replaced.items():
        _replace_argument(
            copies[user], copies.get(argument, argument) if isinstance(argument, Node) else argument, node
        )
    graph.lint()
    return _with_graph(original, graph)


def _add_totals(writer: _Writer, count: int, loss: Tensor) -> list[Node]:
    """``loss_total_k`` placeholders after the batch's."""
    totals = []
    last = [node for node in writer.graph.nodes if node.op == "placeholder"][-1]
    for index in range(count):
        with writer.graph.inserting_after(last):
            last = writer.graph.placeholder(f"loss_total_{index}")
        with writer.fake:
            last.meta["val"] = torch.empty((), dtype=torch.float64, device=loss.device)
        totals.append(last)
    return totals


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _mean_to_sum(writer: _Writer, node: Node, total: Node) -> None:
    """mean(x) -> sum(x) / total; half precision is summed in float32, where no sum of a large part overflows."""
    dtype = node.meta["val"].dtype
    exact = torch.float32 if dtype in _LOW_PRECISION else dtype
    with writer.graph.inserting_before(node):
        summed = (_sum_of_mean if short_name(node) == "mean" else _sum_of_loss)(writer, node, exact)
        divided = writer.call(aten.div.Tensor, summed, writer.cast(total, exact, node), like=node)
        divided = writer.cast(divided, dtype, node)
    node.replace_all_uses_with(divided)
    writer.graph.erase_node(node)


def _sum_of_mean(writer: _Writer, node: Node, dtype: torch.dtype) -> Node:
    a = bound(node)
    if a.get("dim") is None:
        return writer.call(aten.sum.default, a["self"], dtype=dtype, like=node)
    return writer.call(aten.sum.dim_IntList, a["self"], a["dim"], a["keepdim"], dtype=dtype, like=node)


def _sum_of_loss(writer: _Writer, node: Node, dtype: torch.dtype) -> Node:
    """The same operator with reduction sum."""
    a = bound(node)
    if a["reduction"] != MEAN or short_name(node) not in LOSSES:
        raise CaptureError(f"{node.target} is not a mean that can be written as a sum")
    a["reduction"] = SUM
    for name, value in a.items():
        if isinstance(value, Node) and _is_tensor(value) and value.meta["val"].dtype in _LOW_PRECISION:
            a[name] = writer.cast(value, dtype, node)
    positional = [p.name for p in node.target._schema.arguments if not p.kwarg_only]  # type: ignore[union-attr]
    keywords = {name: value for name, value in a.items() if name not in positional}
    return writer.call(node.target, *(a[name] for name in positional), like=node, **keywords)  # type: ignore[arg-type]


def _from_totals(
    writer: _Writer, argument: Node, user: Node, sources: dict[Node, Node], copies: dict[Node, Node]
) -> Node:
    """The computation of ``argument`` again, from the whole batch's totals instead of this part's sums."""
    needed: set[Node] = set()  # between the sources and the argument
    for node in argument.graph.nodes:
        if node in sources or not needed.isdisjoint(node.all_input_nodes):
            needed.add(node)
        if node is argument:
            break
    made: dict[Node, Node] = {}

    def build(node: Node) -> Node:
        if node not in needed:
            return copies[node]
        if node not in made:
            if node in sources:
                value = node.meta["val"]
                total = sources[node]
                made[node] = writer.cast(total, value.dtype, copies[user]) if isinstance(value, Tensor) else total
            else:
                args, kwargs = map_arg(node.args, build), map_arg(node.kwargs, build)
                made[node] = writer.call(node.target, *args, like=copies[node], **kwargs)  # type: ignore[arg-type]
        return made[node]

    result = build(argument)
    value = user.meta.get("val")
    if not isinstance(argument.meta["val"], Tensor) and isinstance(value, Tensor) and value.is_floating_point():
        return writer.cast(result, value.dtype, copies[user])  # a number became a tensor: it must not widen its user
    return result


def _divide_constant(
    writer: _Writer,
    constant: Constant,
    parts: Node,
    copies: dict[Node, Node],
    replaced: dict[tuple[Node, Any], Node],
) -> None:
    user, argument = constant.user, constant.argument
    like = copies[user] if user.op != "output" else copies[argument]
    with writer.graph.inserting_before(copies[user]):
        if isinstance(argument, Node):
            value = replaced.get((user, argument), copies[argument])
            divisor = writer.cast(parts, value.meta["val"].dtype, like)
            replaced[user, argument] = writer.call(aten.div.Tensor, value, divisor, like=like)
        else:
            inverse = writer.call(aten.reciprocal.default, writer.cast(parts, user.meta["val"].dtype, like), like=like)
            replaced[user, argument] = writer.call(aten.mul.Tensor, inverse, argument, like=like)


def _replace_argument(user: Node, old: Any, new: Node) -> None:
    if isinstance(old, Node):
        user.replace_input_with(old, new)
        return
    # A number in the code: scalar overloads take no tensor in its place.
    tensor_overload = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "rsub": aten.rsub.Tensor}
    user.target = tensor_overload[short_name(user)]
    a = bound(user)
    a = {name: new if name in ("self", "other") and value is old else value for name, value in a.items()}
    user.args, user.kwargs = (a["self"], a["other"]), {"alpha": a.get("alpha", 1)}


def _with_graph(original: GraphModule, graph: Graph) -> GraphModule:
    """The same parameters and buffers, all of them, around another graph."""
    module = GraphModule(original, graph)
    for name, parameter in original.named_parameters(remove_duplicate=False):
        _place(module, name, parameter)
    for owner_name, owner in original.named_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            persistent = name not in owner._non_persistent_buffers_set
            _place(module, f"{owner_name}.{name}".lstrip("."), buffer, persistent=persistent)
    module.meta.update(original.meta)
    return module


def _place(module: torch.nn.Module, path: str, value: Tensor, *, persistent: bool = True) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        if not hasattr(module, owner):
            module.add_module(owner, torch.nn.Module())
        module = getattr(module, owner)
    if isinstance(value, torch.nn.Parameter):
        setattr(module, name, value)
    else:
        if name in module._buffers:
            del module._buffers[name]
        elif hasattr(module, name):
            delattr(module, name)
        module.register_buffer(name, value, persistent=persistent)


# --- the weights -----------------------------------------------------------------------------------------------------


def _weights(
    original: GraphModule, inputs: tuple[InputSpec, ...], batch_size: int, sites: tuple[Site, ...]
) -> GraphModule:
    """Each term's weight in a part, from the part's inputs alone."""
    graph = Graph()
    writer = _Writer(graph, original)
    copies = {node: graph.node_copy(node) for node in original.graph.nodes if node.op == "placeholder"}
    memory = Memory(original)
    wanted = [operand for site in sites for operand in _weight_operands(site)]
    needed = memory.ancestors(wanted)
    written = {memory.root[node] for node in needed if writes(node)}
    for node in original.graph.nodes:
        if node in written and node.op == "placeholder":  # the batch is the user's: change a copy
            copies[node] = writer.call(aten.clone.default, copies[node], like=node)
        elif node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda operand: copies[operand])
    sizes = Sizes(original, batch_size)
    batched = next((spec.placeholder for spec in inputs if spec.batched), None)
    batch = next((copy for node, copy in copies.items() if node.name == batched), None)
    graph.output(tuple(_weight(writer, site, copies, sizes, batch) for site in sites))
    graph.lint()
    return GraphModule(original, graph)


def _weight_operands(site: Site) -> list[Node]:
    if site.mask is not None:
        return [site.mask]
    if site.term.weight == "node":
        return [site.node]
    if site.term.weight == "targets":
        a = bound(site.node)
        return [value for value in (a["target"], a.get("weight")) if isinstance(value, Node)]
    return []


def _weight(writer: _Writer, site: Site, copies: dict[Node, Node], sizes: Sizes, batch: Node | None) -> Node:
    like = site.node
    if site.term.weight == "node":
        return _as_float64(writer, copies[site.node], like)
    if site.term.weight == "targets":
        a = bound(site.node)
        weight = copies[a["weight"]] if isinstance(a.get("weight"), Node) else None
        return _count_targets(writer, copies[a["target"]], weight, a["ignore_index"], like)
    if site.term.weight == "elements":
        count = counted_elements(site.node, sizes)
        if site.mask is not None:
            rows = writer.call(aten.sum.default, copies[site.mask], dtype=torch.float64, like=like)
            return writer.call(aten.mul.Tensor, rows, count, like=like)
        if sizes.dynamic and batch is not None:
            size = writer.call(aten.sym_size.int, batch, 0, like=like)
            rows = writer.call(operator.mul, size, count // sizes.batch, like=like)
            return _as_float64(writer, rows, like)
        return _number(writer, float(count), like)
    return _number(writer, 1.0, like)


def _count_targets(writer: _Writer, target: Node, weight: Node | None, ignore: int, like: Node) -> Node:
    """sum over targets t != ignore of w[t]; w = 1 without class weights (torch.nn.CrossEntropyLoss, "mean")."""
    counted = writer.call(aten.ne.Scalar, target, ignore, like=like)
    if weight is None:
        return writer.call(aten.sum.default, counted, dtype=torch.float64, like=like)
    classes = writer.call(aten.mul.Tensor, target, counted, like=like)
    weights = writer.call(aten.index.Tensor, weight, [classes], like=like)
    counts = writer.call(aten.mul.Tensor, weights, counted, like=like)
    return writer.call(aten.sum.default, counts, dtype=torch.float64, like=like)


def _as_float64(writer: _Writer, node: Node, like: Node) -> Node:
    if isinstance(node.meta["val"], Tensor):
        return writer.cast(node, torch.float64, like)
    return writer.number(node, like)


def _number(writer: _Writer, value: float, like: Node) -> Node:
    return writer.call(aten.full.default, [], value, dtype=torch.float64, like=like)

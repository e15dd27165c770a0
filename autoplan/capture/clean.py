"""torch.export's graph made plain: what the user wrote, under the user's names, and nothing of the tracer.

Before and after, for ``loss_fn`` given::

    get_attr model.l.weight; placeholder tensors_0         placeholder x; get_attr l.weight
    call_module _guards_fn, _assert_tensor_metadata(...)   (gone)
    wrap_with_set_grad_enabled(False, submodule, x)        detach(x); the submodule's nodes
    output (loss,)                                         output loss

Nodes keep ``val``, ``nn_module_stack`` (paths as the user's named_modules gives them), ``stack_trace`` and, where the
model recomputes them itself, ``checkpointed``. In-place
operators and random ones stay, dead or not: they change buffers, and the order of random numbers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen

from autoplan.capture import checkpointing
from autoplan.capture.blocks import inline_blocks
from autoplan.capture.folding import Folding
from autoplan.capture.trace import LOSS_PREFIX, MODEL_PREFIX
from autoplan.capture.unfold import unfold
from autoplan.errors import CaptureError

aten = torch.ops.aten
_CHECKS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
    }
)
_COUNT = re.compile(r"(_\d+)+$")
_KEPT_META = ("val", "nn_module_stack", "stack_trace", "torch_fn", "unbacked_bindings")


class Names:
    """From the traced wrapper's names to the user's: ``model.h.0.weight`` to ``h.0.weight``.

    What belongs to a loss module keeps ``loss_fn.`` before it, with underscores added where the model has such names.
    """

    def __init__(self, model: nn.Module) -> None:
        taken = {name.partition(".")[0] for name, _ in _tensors(model)}
        self._loss = LOSS_PREFIX
        while self._loss in taken:
            self._loss += "_"

    def user(self, name: str) -> str:
        head, dot, rest = name.partition(".")
        if head == MODEL_PREFIX:
            return rest
        return self._loss + dot + rest if head == LOSS_PREFIX else name

    def loss(self, name: str) -> str:
        return f"{self._loss}.{name}"


def clean(
    traced: GraphModule,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    placeholder_names: Sequence[str],
    names: Names,
    folding: Folding | None = None,
) -> GraphModule:
    """The plain graph over ``tensors`` (by the user's names). ``folding``: what the trace left folded, if anything."""
    inline_blocks(traced)
    graph = traced.graph
    _drop_checks(graph)
    loss = _return_loss(graph)
    if folding is not None:
        unfold(traced, folding, MODEL_PREFIX)
    graph.owning_module = None  # from here on it reads the user's tensors, not what was traced
    _drop_unread(graph)
    attributes = _rename_attributes(traced, names, tensors)
    _order_attributes(graph, tensors)
    _name_placeholders(graph, placeholder_names)
    root_class = f"{type(model).__module__}.{type(model).__qualname__}"
    _name_operators(graph)
    _make_metas_plain(graph, names, root_class)
    graph.set_codegen(CodeGen())
    if loss.op == "placeholder" or loss.op == "get_attr":
        raise CaptureError(
            "the loss is an input or a parameter: nothing is computed",
            where="example_inputs",
            legal="a loss computed from the inputs and the parameters",
            attempt="check which tensor forward returns",
        )
    return _assemble(graph, attributes, tensors, model)


def retarget(graph_module: GraphModule, device: torch.device | str) -> GraphModule:
    """Let a graph traced on meta run on ``device``: the meta that is baked into arange, full and the like is replaced.

    In place; returns the graph module. Parameters and buffers are not moved.
    """
    device = torch.device(device)

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == "meta" else value

    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, moved)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
            if node.target is aten.histc.default and device.type == "cpu":
                _histogram_in_float(node)
        module.recompile()
    return graph_module


def _histogram_in_float(node: Node) -> None:
    """A CPU counts no integers by histc; on meta nobody noticed (routing in mixtures of experts)."""
    source = node.args[0]
    dtype = node.meta["val"].dtype
    if not isinstance(source, Node) or dtype.is_floating_point:
        return
    with node.graph.inserting_before(node):
        wide = node.graph.call_function(aten.to.dtype, (source, torch.float64))
        wide.meta = {**source.meta, "val": source.meta["val"].to(torch.float64)}
    node.update_arg(0, wide)
    with node.graph.inserting_after(node):
        narrow = node.graph.call_function(aten.to.dtype, (node, dtype))
    narrow.meta = dict(node.meta)
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
    node.meta = {**node.meta, "val": node.meta["val"].to(torch.float64)}


def _drop_checks(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith("_guards")
        if is_guard or node.target in _CHECKS:
            graph.erase_node(node)


def _drop_unread(graph: Graph) -> None:
    """As fx's eliminate_dead_code, without asking of every node whether it is pure, nor checking the graph again."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def _return_loss(graph: Graph) -> Node:
    output = next(iter(reversed(graph.nodes)))
    loss = output.args[0]
    while isinstance(loss, (tuple, list)):
        loss = loss[0]
    output.args = (loss,)
    return loss


def _rename_attributes(traced: GraphModule, names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Give get_attr nodes the user's names; the attributes by those names."""
    attributes = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            name = names.user(node.target)
            value = tensors[name] if name in tensors else _attribute(traced, node.target)
            node.target = name
            attributes[node.target] = value
            if isinstance(value, Tensor):
                node._rename(re.sub(r"\W", "_", node.target))
    return attributes


def _order_attributes(graph: Graph, tensors: Mapping[str, Tensor]) -> None:
    """The user's tensors first, in the user's order; then the trace's constants."""
    place = {name: index for index, name in enumerate(tensors)}
    nodes = [node for node in graph.nodes if node.op == "get_attr"]
    for node in sorted(nodes, key=lambda node: place.get(node.target, len(place)), reverse=True):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _name_placeholders(graph: Graph, placeholder_names: Sequence[str]) -> None:
    """Placeholders first, named as the user names them."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(iter(graph.nodes))
    for node, name in zip(placeholders, placeholder_names, strict=True):
        if node is first:
            first = first.next
        else:
            first.prepend(node)
        node._rename(name)
        node.target = node.name


def _name_operators(graph: Graph) -> None:
    """``linear``, ``linear_1``, ... in graph order: names that follow from the graph, not from how it was traced."""
    space = torch.fx.graph._Namespace()
    for node in graph.nodes:
        if node.op != "call_function":
            space.create_name(node.name, None)
    for node in graph.nodes:
        if node.op == "call_function":
            name = space.create_name(_COUNT.sub("", node.name) or node.name, None)
            object.__setattr__(node, "name", name)  # past fx's hooks: the graph has no owner that listens
    graph._graph_namespace = space


def _make_metas_plain(graph: Graph, names: Names, root_class: str) -> None:
    """Keep what other rooms read, under the user's names; equal module stacks are one object."""
    stacks: dict[tuple[Any, ...], dict[str, Any]] = {}
    for node in graph.nodes:
        plain = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        if line := checkpointing.line_of(node):
            plain[checkpointing.META] = line
        if "nn_module_stack" in plain:
            given = tuple(plain["nn_module_stack"].items())
            if given not in stacks:
                stacks[given] = _plain_stack(plain["nn_module_stack"], names) or {"": ("", root_class)}
            plain["nn_module_stack"] = stacks[given]
        node.meta.clear()
        node.meta.update(plain)


def _plain_stack(stack: Mapping[str, Any], names: Names) -> dict[str, Any]:
    # the wrapper has no path, and torch fills stacks of its own nodes with a name of no module
    return {
        key: (names.user(path), module_class)
        for key, (path, module_class) in stack.items()
        if path.partition(".")[0] in (MODEL_PREFIX, LOSS_PREFIX)
    }


def _assemble(
    graph: Graph, constants: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> GraphModule:
    """A GraphModule that holds the user's own tensors, used or not, in the user's order, and the trace's constants."""
    plain = _LazyGraphModule(nn.Module(), Graph(), class_name=type(model).__name__)
    for target, tensor in tensors.items():
        _assign(plain, target, tensor)
    for target, value in constants.items():
        if target not in tensors:
            _assign(plain, target, value, persistent=False)
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            plain.get_submodule(path)._non_persistent_buffers_set.add(name)
    plain.graph = graph
    return plain


def _assign(root: nn.Module, target: str, value: Any, *, persistent: bool = True) -> None:
    *path, leaf = target.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
    elif isinstance(value, Tensor):
        module._buffers[leaf] = value
        if not persistent:
            module._non_persistent_buffers_set.add(leaf)
    else:
        setattr(module, leaf, value)


def _attribute(module: nn.Module, target: str) -> Any:
    return operator.attrgetter(target)(module)


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)

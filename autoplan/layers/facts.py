"""What each node of a captured graph depends on: parameters, chance, mutations.

A node *travels* when its value must be sent to the stage that reads it: it depends on a parameter, on chance (a second
draw would differ), or changes state. All other nodes are the *prologue* (masks, rotary tables, position numbers):
functions of the batch and of buffers alone, recomputed wherever they are used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.capture.batch_memory import written
from autoplan.capture.types import Capture
from autoplan.layers.operators import ALIASING, CUTS_GRADIENT, RANDOM, operator_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """``nodes``: the call_function nodes in graph order; ``position`` their index.

    ``before`` adds to a node's inputs the in-place operators whose effect it reads; ``after`` is its inverse.
    ``parameters``: get_attr node -> Parameter; ``canonical``: parameter name -> the name of its tied group that counts.
    ``root``: the node whose memory a node may share (itself where it is not there); ``writes``: the roots that each
    in-place operator changes.
    """

    nodes: tuple[Node, ...]
    position: Mapping[Node, int]
    before: Mapping[Node, tuple[Node, ...]]
    after: Mapping[Node, tuple[Node, ...]]
    parameters: Mapping[Node, nn.Parameter]
    canonical: Mapping[str, str]
    travelling: frozenset[Node]
    differentiable: frozenset[Node]
    loss: Node | None
    root: Mapping[Node, Node]
    writes: Mapping[Node, tuple[Node, ...]]

    def parameters_of(self, node: Node) -> Iterator[tuple[Node, nn.Parameter]]:
        """The parameters that ``node`` reads, with their get_attr nodes."""
        for source in node.all_input_nodes:
            if source in self.parameters:
                yield source, self.parameters[source]

    def has_matrix(self, node: Node) -> bool:
        """Whether ``node`` reads a parameter of two dimensions or more."""
        return any(parameter.dim() > 1 for _, parameter in self.parameters_of(node))


def module_stack(node: Node) -> tuple[tuple[str, str], ...]:
    """(path, class) of the modules around ``node``, outermost first; ``@k`` ends the path of a module's k-th repeat."""
    found = []
    for call, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if path and not path.startswith("_empty_nn_module_stack"):
            _, at, repeat = str(call).rpartition("@")
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            found.append((path if "@" in path else path + at + repeat * bool(at), name))
    return tuple(found)


def module_path(node: Node) -> str:
    """The innermost module around ``node``, by the user's path; "" for the model itself."""
    stack = module_stack(node)
    return stack[-1][0].partition("@")[0] if stack else ""


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a node's ``meta["val"]``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def gather_facts(capture: Capture) -> Facts:
    graph_module = capture.graph_module
    nodes = tuple(node for node in graph_module.graph.nodes if node.op == "call_function")
    named = dict(graph_module.named_parameters(remove_duplicate=False))
    sources = [node for node in graph_module.graph.nodes if node.op == "get_attr"]
    parameters = {node: named[str(node.target)] for node in sources if str(node.target) in named}
    root, writes = _aliases(nodes)
    before = _before(nodes, root, writes)
    after: dict[Node, list[Node]] = {}
    for node in nodes:
        for earlier in before[node]:
            after.setdefault(earlier, []).append(node)
    travelling = _travelling(nodes, before, parameters, root, writes)
    return Facts(
        nodes=nodes,
        position={node: index for index, node in enumerate(nodes)},
        before=before,
        after={node: tuple(later) for node, later in after.items()},
        parameters=parameters,
        canonical={name: group[0] for group in capture.tied for name in group},
        travelling=frozenset(travelling),
        differentiable=frozenset(_differentiable(nodes, parameters)),
        loss=_loss(graph_module),
        root=root,
        writes=writes,
    )


def _loss(graph_module: GraphModule) -> Node | None:
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    return next(iter(output.all_input_nodes), None)


def _aliases(nodes: tuple[Node, ...]) -> tuple[dict[Node, Node], dict[Node, tuple[Node, ...]]]:
    """The node whose memory each node may share, and the roots that each in-place operator writes."""
    root: dict[Node, Node] = {}
    writes: dict[Node, tuple[Node, ...]] = {}
    for node in nodes:
        changed = tuple(written(node))
        if changed:
            writes[node] = tuple(root.get(value, value) for value in changed)
            root[node] = writes[node][0]
        elif node.target is operator.getitem or operator_name(node.target) in ALIASING:
            source = next(iter(node.all_input_nodes), None)
            if source is not None:
                root[node] = root.get(source, source)
    return root, writes


def _before(
    nodes: tuple[Node, ...], root: Mapping[Node, Node], writes: Mapping[Node, tuple[Node, ...]]
) -> dict[Node, tuple[Node, ...]]:
    last_write: dict[Node, Node] = {}
    before: dict[Node, tuple[Node, ...]] = {}
    for node in nodes:
        inputs = tuple(node.all_input_nodes)
        effects = (last_write.get(root.get(source, source)) for source in inputs)
        before[node] = tuple(dict.fromkeys((*inputs, *(effect for effect in effects if effect is not None))))
        for changed in writes.get(node, ()):
            last_write[changed] = node
    return before


def _travelling(
    nodes: tuple[Node, ...],
    before: Mapping[Node, tuple[Node, ...]],
    parameters: Mapping[Node, nn.Parameter],
    root: Mapping[Node, Node],
    writes: Mapping[Node, tuple[Node, ...]],
) -> set[Node]:
    found: set[Node] = set()
    roots: set[Node] = set()
    while True:
        for node in nodes:
            changes_state = any(changed.op != "call_function" for changed in writes.get(node, ()))
            depends = any(earlier in found or earlier in parameters for earlier in before[node])
            if changes_state or depends or node in roots or _draws(node):
                found.add(node)
        # What a travelling operator writes into cannot be recomputed elsewhere.
        grown = {changed for node in found for changed in writes.get(node, ()) if changed.op == "call_function"}
        if grown <= found:
            return found
        roots |= grown


def _draws(node: Node) -> bool:
    """Whether the node's value depends on chance."""
    name = operator_name(node.target)
    if name in ("dropout", "dropout_", "native_dropout", "feature_dropout", "alpha_dropout"):
        probability, train = (*node.args[1:], *node.kwargs.values(), 0.0, True)[:2]
        return bool(probability) and train is not False
    return name in RANDOM


def _differentiable(nodes: tuple[Node, ...], parameters: Mapping[Node, nn.Parameter]) -> set[Node]:
    found: set[Node] = {node for node, parameter in parameters.items() if parameter.requires_grad}
    for node in nodes:
        if operator_name(node.target) in CUTS_GRADIENT or _without_gradient(node):
            continue
        made = [value.dtype for value in tensors(node.meta.get("val"))]
        floating = any(dtype.is_floating_point or dtype.is_complex for dtype in made)
        if floating and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _without_gradient(node: Node) -> bool:
    """A block that the user ran under torch.no_grad()."""
    is_no_grad = getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"
    return is_no_grad and node.args[0] is False

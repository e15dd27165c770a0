"""What the linters of rewritten graphs share: operands, local shapes, the error of a value read as what it is not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._guards import detect_fake_mode
from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.capture.shapes import MAX_BATCH, shape_at
from autoplan.errors import AutoplanError
from autoplan.passes.rewriting import origin_of
from autoplan.sharding.operation import Shape, module_path, tensors_of
from autoplan.sharding.placements import Placement, Shard


def tensor_operands(node: Node) -> list[Node]:
    """Tensor operands in order, each occurrence."""
    found: list[Node] = []

    def visit(child: Node) -> Node:
        if tensors_of(child.meta.get("val")):
            found.append(child)
        return child

    torch.fx.node.map_arg((node.args, node.kwargs), visit)
    return found


def share(shape: Shape, state: Placement, degree: int) -> Shape:
    """The part of ``shape`` that one of ``degree`` ranks holds."""
    if not isinstance(state, Shard):
        return shape
    return tuple(size // degree if dim == state.dim else size for dim, size in enumerate(shape))


def shapes_of(node: Node) -> tuple[Shape, ...]:
    """Of the tensors that ``node`` is noted to give, the batch as :data:`MAX_BATCH`."""
    return tuple(shape_at(tensor, MAX_BATCH) for tensor in tensors_of(node.meta.get("val")))


def shapes_when_run(node: Node) -> tuple[Shape, ...] | None:
    """What ``node`` gives when it is run on the shapes of its operands alone; None where nothing can be run.

    Raises whatever the operator does where its arguments do not fit.
    """
    mode = detect_fake_mode([child.meta.get("val") for child in node.all_input_nodes])
    if mode is None:
        return None
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda child: child.meta.get("val"))
    with mode, torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return tuple(shape_at(tensor, MAX_BATCH) for tensor in tensors_of(result))


def literals_problem(node: Node, wanted: tuple[Shape, ...]) -> str:
    """What ``node``, whose sizes stand in the graph, needs to give ``wanted`` shapes; "" where it does."""
    try:
        local = shapes_when_run(node)
    except Exception as error:
        return f"local sizes ({str(error).splitlines()[0]})"
    return "" if local in (None, wanted) else f"a local shape of {wanted}, not {local}"


def misread(node: Node, originals: Mapping[str, Node], found: str, wanted: str, *, axis: str) -> AutoplanError:
    """``node`` reads values placed ``found`` and needs ``wanted``, at the user's line."""
    beside = originals.get(node.name) or originals.get(origin_of(node))
    path = module_path(beside) if beside is not None else ""
    return AutoplanError(
        f"the split program would compute other numbers: `{node.name}` "
        f"({getattr(node.target, '__name__', node.target)}{f' of {path}' if path else ''}) "
        f"reads values placed {found or 'nowhere'}, and needs {wanted}",
        where=node_line(beside) if beside is not None else node.name,
        attempt=f"plan without the {axis} axis ({axis}=1), and report this graph",
    )

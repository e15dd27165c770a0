"""An option is right when the ranks' results, put together, are the whole's: every option of many operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  registers its grouped product
from torch import Tensor

from autoplan.sharding import Partial, Shard, assemble, take_shard
from autoplan.sharding.operation import GraphFacts, Operation, rebuild
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import RESULT, Option
from tests.sharding.test_rules import operation

DEGREE = 2
X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
BIAS, WEIGHTS, ENDS = Y[0, :, 0].clone(), torch.randn(3, 8, 8), torch.tensor([0, 2, 3])
ROWS = torch.tensor([[0, 2, 1], [3, 1, 1]])

CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "topk": (lambda x: x.topk(3, dim=1), (X,)),
    "sort": (lambda x: x.sort(dim=-1), (X,)),
    "cumsum": (lambda x: x.cumsum(0), (X,)),
    "diff": (lambda x: x.diff(dim=1), (X,)),
    "flip": (lambda x: x.flip([0, 2]), (X,)),
    "index, first": (lambda x, i: x[i], (X, ROWS)),
    "index, middle": (lambda x, i: x[:, i], (X, ROWS)),
    "index, two": (lambda x, i: x[:, i, i], (X, ROWS)),
    "stack": (lambda x, y: torch.stack([x, y], dim=1), (X, Y)),
    "stack, last": (lambda x, y: torch.stack([x, y], dim=-1), (X, Y)),
    "repeat": (lambda x: x.repeat(2, 1, 3, 1), (X,)),
    "mse, sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), (X, Y)),
    "l1, none": (lambda x, y: F.l1_loss(x, y, reduction="none"), (X, Y)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (X,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (X,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 2)), (X,)),
    "softmax": (lambda x: x.softmax(1), (X,)),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), (X,)),
    "transpose": (lambda x: x.transpose(0, 2), (X,)),
    "matmul": (lambda x, y: x @ y.transpose(1, 2).contiguous(), (X, Y)),
    "sum": (lambda x: x.sum(1), (X,)),
    "roll": (lambda x: x.roll((1, 2), (0, 2)), (X,)),
    "gather": (lambda x, i: x.gather(1, i), (X, (Y > 0).long())),
    "index_select": (lambda x, i: x.index_select(1, i), (X, ROWS[0])),
    "unbind": (lambda x: x.unbind(1), (X,)),
    "tril": (lambda x: x.tril(), (X,)),
    "glu": (lambda x: F.glu(x, dim=2), (X,)),
    "hardswish": (lambda x: F.hardswish(x), (X,)),
    "broadcast": (lambda x, y: torch.broadcast_tensors(x, y), (X, Y[:, :1])),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (X, Y)),
    "einsum, implicit": (lambda x, y: torch.einsum("...j, ...j", x, y), (X, Y)),
    "convolution by groups": (lambda x, w, b: F.conv1d(x, w, b, groups=2), (X, X[:, :3, :3].repeat(2, 1, 1)[:6], BIAS)),
    "depthwise": (lambda x, w: F.conv1d(x, w, groups=6), (X, X[0, :, None, :3])),
    "transposed convolution": (lambda x, w: F.conv_transpose1d(x, w, stride=2), (X, X[:, :, :4].transpose(0, 1))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (X, BIAS, BIAS)),
    "batch_norm, evaluated": (lambda x, m, w: F.batch_norm(x, m.detach(), m.detach() ** 2 + 1, w, w), (X, BIAS, BIAS)),
    "batch_norm without statistics": (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), (X, BIAS)),
    "bags": (lambda w, i: F.embedding_bag(i, w, i), (X[0], ENDS)),
    "grouped product": (lambda x, w, e: torch.ops.transformers.grouped_mm_fallback(x, w, e), (X[0, :3], WEIGHTS, ENDS)),
    "cat": (lambda x, y: torch.cat([x, y], 2), (X, Y)),
}
WITHOUT = {
    "mean loss": (lambda x, y: F.mse_loss(x, y), (X, Y)),
    "apart": (lambda x, i: x[i, :, i], (X, ROWS)),
    "roll of all": (lambda x: x.roll(1), (X,)),
    "einsum along a diagonal": (lambda x: torch.einsum("bii->bi", x[:, :, :6]), (X,)),
    "odd groups": (lambda x, w: F.group_norm(x, 3, w), (X, BIAS)),
    "batch_norm that keeps statistics": (
        lambda x, w: F.batch_norm(x, w.detach(), w.detach() + 1, w, w, training=True),
        (X, BIAS),
    ),
}


def options(view: Operation) -> Iterator[Option]:
    """Every option of the operator, asked from each operand and from the result."""
    rule = rule_of(view.node)
    assert rule is not None
    shapes = [(slot, operand.shape) for slot, operand in enumerate(view.operands)] + [(RESULT, view.shape)]
    for slot, shape in shapes:
        for dim, size in enumerate(shape):
            if Shard(dim).divides(size, DEGREE):
                yield from rule.options(view, slot, Shard(dim))


def run(view: Operation, operands: list[Tensor], local: dict[str, Any]) -> tuple[Tensor, ...]:
    names = [argument.name for argument in view.node.target._schema.arguments]
    args, kwargs = rebuild(view.node, tuple(operands), lambda node: node)
    bound = {**dict(zip(names, args, strict=False)), **kwargs, **local}
    result = view.node.target(**bound)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str) -> None:
    function, tensors = CASES[name]
    view = operation(function, *tensors, degree=DEGREE)
    if view.key == "getitem":  # of an operator with several results
        maker = view.operands[0].node
        view = GraphFacts(maker.graph.owning_module, DEGREE).operation(maker)
    values = [torch.randn(operand.shape) for operand in view.operands]
    for slot, operand in enumerate(view.operands):
        if not operand.node.meta["val"].is_floating_point():
            values[slot] = tensors[-1]
    whole = run(view, values, {})
    found = list(dict.fromkeys(options(view)))
    assert found, "no option at all"
    rule = rule_of(view.node)
    assert rule is not None
    for option in found:
        ranks = []
        for rank in range(DEGREE):
            local = [take_shard(v, s, index=rank, degree=DEGREE) for v, s in zip(values, option.inputs, strict=True)]
            ranks.append(run(view, local, rule.local_arguments(view, option)))
        for wanted, parts in zip(whole, zip(*ranks, strict=True), strict=True):
            if isinstance(option.output, Shard) and option.output.dim >= wanted.dim():
                continue  # of a tuple whose elements are unlike: nothing reads this one
            summed = isinstance(option.output, Partial)
            made = torch.stack(parts).sum(0) if summed else assemble(list(parts), option.output)
            torch.testing.assert_close(made, wanted, msg=f"{name}: {option}", equal_nan=True)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_needs_the_whole_has_no_option(name: str) -> None:
    function, tensors = WITHOUT[name]
    assert not list(options(operation(function, *tensors, degree=DEGREE)))

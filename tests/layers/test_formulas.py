"""FLOP formulas against torch's own counter, on products torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autoplan.layers.formulas import Operand, work_of
from autoplan.layers.operators import operator_kind

aten = torch.ops.aten


def operand(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Operand(tuple(item.shape), item.requires_grad)
    return [operand(each) for each in item] if isinstance(item, list) else item


def tensor(*shape: int, gradient: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=gradient)


CASES = {
    "linear": (F.linear, [tensor(2, 5, 8), tensor(3, 8), tensor(3)]),
    "linear without input gradient": (F.linear, [tensor(4, 8, gradient=False), tensor(3, 8)]),
    "matmul by a matrix": (torch.matmul, [tensor(2, 5, 8), tensor(8, 3)]),
    "matmul, broadcast": (torch.matmul, [tensor(2, 4, 5, 8), tensor(2, 4, 8, 6)]),
    "mm": (torch.mm, [tensor(5, 8), tensor(8, 3)]),
    "bmm": (torch.bmm, [tensor(4, 5, 8), tensor(4, 8, 3)]),
    "addmm": (torch.addmm, [tensor(3), tensor(5, 8), tensor(8, 3)]),
    "baddbmm": (torch.baddbmm, [tensor(4, 5, 3), tensor(4, 5, 8), tensor(4, 8, 3)]),
    "einsum": (torch.einsum, ["bhtd,bhsd->bhts", [tensor(2, 4, 5, 8), tensor(2, 4, 6, 8)]]),
    "conv2d": (F.conv2d, [tensor(2, 4, 9, 9), tensor(6, 4, 3, 3), None, 2, 1]),
    "conv2d of first layer": (F.conv2d, [tensor(2, 4, 9, 9, gradient=False), tensor(6, 4, 3, 3)]),
    "conv1d": (F.conv1d, [tensor(2, 4, 9), tensor(6, 4, 3)]),
    "conv3d": (F.conv3d, [tensor(2, 4, 5, 5, 5), tensor(6, 4, 3, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [tensor(2, 4, 5, 5), tensor(4, 6, 3, 3), None, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_torch_counts_forward_and_backward(case: str) -> None:
    function, arguments = CASES[case]
    name = case.split()[0].rstrip(",")
    with FlopCounterMode(display=False) as counter:
        output = function(*arguments)
        forward = counter.get_total_flops()
        output.sum().backward()
    work = work_of(name, [operand(item) for item in arguments], Operand(tuple(output.shape)))
    assert work.flops == forward
    assert work.backward_flops == counter.get_total_flops() - forward
    assert work.gemm is not None
    gemm = work.gemm
    assert 2 * gemm.m * gemm.n * gemm.k * gemm.groups == work.flops


def test_grouped_convolution_is_one_product_a_group() -> None:
    x, weight = tensor(2, 8, 6, 6), tensor(12, 2, 3, 3)
    work = work_of("conv2d", [operand(x), operand(weight)], Operand(tuple(F.conv2d(x, weight, groups=4).shape)))
    # 2 x 4 x 4 places, 12 / 4 channels out, windows of 2 x 3 x 3, four times over.
    assert work.gemm is not None
    assert (work.gemm.m, work.gemm.n, work.gemm.k, work.gemm.groups) == (2 * 4 * 4, 3, 18, 4)
    assert work.flops == 2 * (2 * 4 * 4) * 3 * 18 * 4


def test_experts_share_the_rows() -> None:
    work = work_of("_grouped_mm", [Operand((64, 16), True), Operand((8, 16, 32), True)], Operand((64, 32)))
    assert work.flops == 2 * 64 * 16 * 32
    assert work.backward_flops == 2 * work.flops
    assert work.gemm is not None and (work.gemm.m, work.gemm.groups) == (8, 8)


def test_an_lstm_multiplies_every_weight_once_a_step() -> None:
    weights = [Operand((4 * 16, 8), True), Operand((4 * 16, 16), True), Operand((64,), True), Operand((64,), True)]
    work = work_of("lstm", [Operand((2, 5, 8), True), [], weights], Operand((2, 5, 16)))
    assert work.flops == 2 * (2 * 5) * (64 * 8 + 64 * 16)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.linear.default, "gemm"),
        (aten.scaled_dot_product_attention.default, "attention"),
        (aten.conv2d.default, "convolution"),
        (aten.embedding.default, "embedding"),
        (aten.group_norm.default, "normalization"),
        (aten.rms_norm.default, "normalization"),
        (aten.softmax.int, "softmax"),
        (aten.cross_entropy_loss.default, "cross_entropy"),
        (aten.glu.default, "elementwise"),
        (aten.mul.Tensor, "elementwise"),
        (aten.add_.Tensor, "elementwise"),
        (aten.erfinv.default, "elementwise"),  # in no table: torch tags it pointwise
        (aten.max.other, "elementwise"),
        (aten.max.dim, "reduction"),
        (aten.cat.default, "copy"),
        (aten.index_put_.default, "copy"),
        (aten.transpose.int, "view"),
        (aten.topk.default, "other"),
    ],
)
def test_operators_are_sorted_into_kinds(target: Any, kind: str) -> None:
    assert operator_kind(target) == kind

"""Which operator has which rule. One line an operator; :func:`register_rule` adds the user's own."""

from __future__ import annotations

import torch
from torch.fx import Node

from autoplan.sharding.channels import BatchNorm, ByGroups, Convolution
from autoplan.sharding.equations import Einsum
from autoplan.sharding.operation import Operation, operator_key
from autoplan.sharding.rearrange import (
    Chunk,
    Concatenation,
    Item,
    Pad,
    Permutation,
    Reshape,
    Select,
    Slice,
    Split,
    Unbind,
)
from autoplan.sharding.rules import FactorRule, Factors, Option, Pointwise, Rule
from autoplan.sharding.selecting import AlongDimension, Gather, Index, IndexSelect, Loss, Repeat, Stack
from autoplan.sharding.special import Attention, Bag, CrossEntropy, Embedding, Reduction, Size, Softmax


class _AddMm(FactorRule):
    """The bias is added after the sum over ranks only where nothing scales it."""

    def factors(self, operation: Operation) -> Factors | None:
        plain = operation.arguments.get("beta", 1) == 1 and operation.arguments.get("alpha", 1) == 1
        return super().factors(operation) if plain else None


_RULES: dict[str, Rule] = {}


def register_rule(line: str) -> None:
    """Teach autoplan an operator in one line: ``register_rule("mylib.scale: x[*b, c], w[c] -> y[*b, c]")``.

    The name is the operator's without overload, aten's without ``aten.``. Raises AutoplanError where the line is
    not a rule.
    """
    _add(FactorRule(line))


def _add(rule: FactorRule) -> None:
    _RULES[rule.name] = rule


for _line in """
linear: x[*b, i], w[o, i], +bias[o] -> y[*b, o]
mm: a[m, k], b[k, n] -> y[m, n]
bmm: a[g, m, k], b[g, k, n] -> y[g, m, n]
matmul: a[*b, m, k], b[*b, k, n] -> y[*b, m, n]
layer_norm: x[*b, c!], w[c!], bias[c!] -> y[*b, c!]
rms_norm: x[*b, c!], w[c!] -> y[*b, c!]
max_pool1d: x[*b, h!] -> y[*b, p!]
avg_pool1d: x[*b, h!] -> y[*b, p!]
max_pool2d: x[*b, h!, w!] -> y[*b, p!, q!]
avg_pool2d: x[*b, h!, w!] -> y[*b, p!, q!]
adaptive_avg_pool1d: x[*b, h!] -> y[*b, p!]
adaptive_avg_pool2d: x[*b, h!, w!] -> y[*b, p!, q!]
adaptive_max_pool2d: x[*b, h!, w!] -> y[*b, p!, q!]
upsample_nearest1d: x[*b, h!] -> y[*b, p!]
upsample_nearest2d: x[*b, h!, w!] -> y[*b, p!, q!]
upsample_bilinear2d: x[*b, h!, w!] -> y[*b, p!, q!]
upsample_bicubic2d: x[*b, h!, w!] -> y[*b, p!, q!]
tril: x[*b, h!, w!] -> y[*b, h!, w!]
triu: x[*b, h!, w!] -> y[*b, h!, w!]
_grouped_mm: x[t!, i], w[g!, i, o], ends[g!] -> y[t!, o]
transformers.grouped_mm_fallback: x[t!, i], w[g!, i, o], ends[g!] -> y[t!, o]
""".strip().splitlines():
    register_rule(_line)
_add(_AddMm("addmm: +bias[*m, n], a[*m, k], b[k, n] -> y[*m, n]"))
for _rank in (1, 2, 3):
    _add(Convolution(f"conv{_rank}d: x[b, i, *s!], w[o, i, *k!], +bias[o] -> y[b, o, *r!]"))
    _add(Convolution(f"conv_transpose{_rank}d: x[b, i, *s!], w[i, o, *k!], +bias[o] -> y[b, o, *r!]"))
_add(ByGroups("group_norm: x[b!, c, *s!], w[c], bias[c] -> y[b!, c, *s!]", "num_groups"))
_add(BatchNorm("batch_norm: x[b!, c, *s!], w[c], bias[c], mean[c], var[c] -> y[b!, c, *s!]"))
_RULES |= {
    "embedding": Embedding(),
    "embedding_bag": Bag(),
    "einsum": Einsum(),
    "cross_entropy_loss": CrossEntropy(),
    "scaled_dot_product_attention": Attention(),
    "cat": Concatenation(),
    "concat": Concatenation(),
    "pad": Pad(),
    "constant_pad_nd": Pad(),
    "getitem": Item(),
    "select": Select(),
    "slice": Slice(),
    "chunk": Chunk(),
    "split": Split(),
    "split_with_sizes": Split(),
    "unbind": Unbind(),
    "view": Reshape("size"),
    "_unsafe_view": Reshape("size"),
    "reshape": Reshape("shape"),
    "unflatten": Reshape("sizes"),
    "flatten": Reshape(),
    "sym_size": Size(),
    "sum": Reduction(adds=True),
}
_RULES |= dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), Softmax())
_RULES |= dict.fromkeys(
    ("mean", "amax", "amin", "argmax", "argmin", "var", "std", "prod", "all", "any", "logsumexp"), Reduction()
)
_RULES |= dict.fromkeys(
    ("transpose", "swapaxes", "t", "numpy_T", "mT", "permute", "unsqueeze", "squeeze"), Permutation()
)
# Element-wise operators that torch does not tag as such; the linear ones first.
_RULES |= dict.fromkeys(
    ("alias", "contiguous", "clone", "expand", "expand_as", "neg", "add", "sub"), Pointwise(linear=True)
)
_RULES |= dict.fromkeys(("broadcast_tensors", "hardswish", "hardswish_", "floor_divide"), Pointwise())
_RULES |= dict.fromkeys(("dropout", "dropout_", "alpha_dropout", "to", "type_as", "detach", "where"), Pointwise())
_RULES |= dict.fromkeys(("__and__", "__or__", "__xor__", "masked_fill", "masked_fill_", "lift_fresh_copy"), Pointwise())
_RULES |= dict.fromkeys(
    ("topk", "sort", "argsort", "cummax", "logcumsumexp", "kthvalue", "cumprod", "glu"), AlongDimension()
)
_RULES |= dict.fromkeys(("cumsum", "diff"), AlongDimension(linear=True))
_RULES |= {
    "flip": AlongDimension("dims", linear=True),
    "roll": AlongDimension("dims", linear=True),
    "index": Index(),
    "index_select": IndexSelect(),
    "gather": Gather(),
    "stack": Stack(),
    "repeat": Repeat(),
}
_RULES |= dict.fromkeys(
    ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"), Loss()
)
_POINTWISE = Pointwise()
# Values made from nothing but sizes: they run whole on every rank, and that is no loss.
_SOURCES = frozenset(
    {"arange", "zeros", "ones", "full", "empty", "scalar_tensor", "full_like", "zeros_like", "ones_like", "empty_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full"}
)


def rule_of(node: Node) -> Rule | None:
    """The rule for ``node``'s operator, None where there is none (it then runs whole on every rank)."""
    key = operator_key(node.target)
    if key in _RULES:
        return _RULES[key]
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return _POINTWISE
    return None


def needs_no_rule(node: Node) -> bool:
    """Whether running whole is all that could be wished for: numbers, and values made from sizes alone."""
    return operator_key(node.target) in _SOURCES


__all__ = ["Option", "needs_no_rule", "register_rule", "rule_of"]

"""What is known of each ATen operator before running it: its kind, and sets of names with a property.

Names are those of the overload packet (``linear`` for ``aten.linear.default``). Operators that no table names are
"elementwise" where torch tags them pointwise, else "other".
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from autoplan.layers.types import OperatorKind

_TABLE: dict[OperatorKind, str] = {
    "gemm": "linear matmul mm bmm addmm baddbmm addbmm einsum mv addmv dot vdot inner outer bilinear",
    "grouped_gemm": "grouped_mm_fallback grouped_mm _grouped_mm _scaled_grouped_mm",
    "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_flash_attention_for_cpu",
    "convolution": "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution",
    "embedding": "embedding embedding_bag _embedding_bag",
    "normalization": "layer_norm native_layer_norm rms_norm _fused_rms_norm batch_norm _native_batch_norm_legit"
    " native_batch_norm cudnn_batch_norm group_norm native_group_norm instance_norm local_response_norm",
    "softmax": "softmax _softmax log_softmax _log_softmax _safe_softmax",
    "cross_entropy": "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward",
    "elementwise": "dropout dropout_ native_dropout feature_dropout alpha_dropout softplus glu silu gelu relu relu6"
    " hardswish hardsigmoid leaky_relu elu selu celu mish prelu rrelu where arange zeros ones full empty zeros_like"
    " ones_like full_like empty_like new_zeros new_ones new_full new_empty rand randn rand_like randn_like randint"
    " bernoulli tril triu floor_divide masked_fill masked_fill_ fill_ zero_ linspace eye one_hot upsample_nearest1d"
    " upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
    " upsample_trilinear3d __and__ __or__ __xor__ __iand__ __ior__ __lshift__ __rshift__",
    "reduction": "sum mean amax amin max min argmax argmin var std var_mean std_mean cumsum cumprod norm"
    " linalg_vector_norm any all prod logsumexp diff max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"
    " adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d mse_loss"
    " l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div histc bincount"
    " cosine_similarity cdist logcumsumexp cummax",
    "copy": "clone cat concat stack hstack vstack repeat repeat_interleave tile pad constant_pad_nd index gather"
    " scatter scatter_ scatter_add scatter_add_ scatter_reduce index_put index_put_ index_select index_add"
    " index_add_ index_copy index_copy_ masked_select masked_scatter copy_ copy roll flip take_along_dim"
    " lift_fresh_copy slice_scatter select_scatter diagonal_scatter pixel_shuffle pixel_unshuffle im2col col2im"
    " _to_copy",
    "view": "view transpose permute t numpy_T mT unsqueeze squeeze expand slice select split split_with_sizes chunk"
    " tensor_split getitem alias detach unflatten unbind narrow diagonal view_as expand_as unfold movedim swapaxes"
    " as_strided sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum sym_size sym_numel sym_stride"
    " sym_constrain_range_for_size _assert_tensor_metadata _assert_scalar real imag view_as_real view_as_complex T"
    " lift_fresh",
    "other": "sort topk argsort nonzero unique lstm gru rnn_tanh rnn_relu item _local_scalar_dense",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_KINDS: dict[str, OperatorKind] = {name: kind for kind, names in _TABLE.items() for name in names.split()}

# A view or a copy, as the strides have it: the run on meta decides.
EITHER = _names("reshape flatten contiguous to type_as ravel reshape_as")

# The result may share its first operand's memory.
ALIASING = _names(_TABLE["view"]) - {"sym_size", "sym_numel", "sym_stride"} | EITHER

# Nothing flows back through these, whatever their operands.
CUTS_GRADIENT = _names(
    "detach zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty rand_like randn_like"
    " bernoulli sym_size sym_numel sym_stride argmax argmin argsort floor_divide histc bincount eq ne lt le gt ge"
    " isnan isinf isfinite logical_and logical_or logical_not item _local_scalar_dense nonzero one_hot lift_fresh_copy"
    " bitwise_not bitwise_and bitwise_or"
)

RANDOM = _names(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ uniform_"
    " multinomial rrelu poisson exponential_ fractional_max_pool2d"
)

GEMMS = _names(_TABLE["gemm"])
GROUPED_GEMMS = _names(_TABLE["grouped_gemm"])
ATTENTIONS = _names(_TABLE["attention"])
CONVOLUTIONS = _names(_TABLE["convolution"])
RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
HEAVY = GEMMS | GROUPED_GEMMS | ATTENTIONS | CONVOLUTIONS | RECURRENT

_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def operator_name(target: Any) -> str:
    """``linear`` of ``aten.linear.default``; a function's own name otherwise."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return _written(target)[0]
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def operator_label(target: Any) -> str:
    """The name that users read: ``aten.linear.default``; holds no address, so it is equal in every process."""
    if isinstance(target, torch._ops.OpOverload):
        return _written(target)[1]
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{operator_name(target)}".lstrip("._")


@functools.cache
def _written(target: torch._ops.OpOverload) -> tuple[str, str]:
    """Name and label, which graphs of thousands of nodes ask for again and again."""
    return str(target._schema.name).rpartition("::")[2], str(target)


def operator_kind(target: Any) -> OperatorKind:
    """The kind from the table; views that may be copies (:data:`EITHER`) are "view" here."""
    name = operator_name(target)
    if name in EITHER:
        return "view"
    if name in ("max", "min") and target in (torch.ops.aten.max.other, torch.ops.aten.min.other):
        return "elementwise"  # of two tensors; the other overloads reduce one
    known = _KINDS.get(name) or _KINDS.get(name.rstrip("_"))
    if known is not None:
        return known
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    in_operator_module = getattr(target, "__module__", "") in ("_operator", "math")
    return "elementwise" if pointwise or in_operator_module else "other"


def dtype_name(dtype: torch.dtype) -> str:
    """Short name: fp32, bf16, fp16, fp64, fp8, int64, bool ..."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)

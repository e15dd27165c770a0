"""How the batch passes through each operator: the table behind :mod:`autoplan.capture.coupling`."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor
from torch.fx import Node

from autoplan.capture.batch_flow import Flow, combine, rule
from autoplan.capture.batch_state import (
    Free,
    Mixed,
    PerRow,
    Rows,
    State,
    moved,
    tensors,
)

Arguments = dict[str, Any]


def pointwise(flow: Flow, node: Node, arguments: Arguments) -> State:
    """Every operand broadcast against the others from the right."""
    operands = [(value, range(-flow.rank(value), 0)) for value in tensors(arguments.values())]
    rank = max((len(labels) for _, labels in operands), default=0)
    return combine(flow, node, operands, range(-rank, 0))


@rule(
    """
    dropout native_dropout alpha_dropout feature_dropout copy fill masked_fill __and__ __or__ __xor__ __lshift__
    __rshift__ isfinite isnan isclose type_as log_sigmoid rrelu selu square bernoulli float_power true_divide
    divide multiply subtract lerp clip relu6 logical_and logical_or logical_not logical_xor log_normal normal
    uniform exponential fake_quantize_per_tensor_affine celu greater less greater_equal less_equal not_equal
    """
)
def _pointwise(flow: Flow, node: Node, a: Arguments) -> State:
    state = pointwise(flow, node, a)
    return (state, state) if isinstance(node.meta.get("val"), (tuple, list)) else state


@rule("to _to_copy contiguous clone alias detach lift_fresh_copy lift_fresh positive cpu")
def _same_values(flow: Flow, node: Node, a: Arguments) -> State:
    return flow.state(node.args[0])


@rule("broadcast_tensors meshgrid")
def _broadcast_tensors(flow: Flow, node: Node, a: Arguments) -> State:
    outputs = node.meta["val"]
    states = []
    for value, output in zip(tensors(node.args), outputs, strict=True):
        state = flow.state(value)
        if isinstance(state, PerRow):
            state = moved(state, state.dim + len(output.shape) - flow.rank(value))
        states.append(state)
    return tuple(states)


@rule("zeros_like ones_like full_like empty_like rand_like randn_like randint_like normal_like")
def _filled_like(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.state(node.args[0])
    return Rows(dim=state.dim, order=state.order) if isinstance(state, Rows) else Free()


@rule(
    """
    full zeros ones empty new_full new_zeros new_ones new_empty empty_strided rand randn randint scalar_tensor
    new_empty_strided
    """
)
def _filled(flow: Flow, node: Node, a: Arguments) -> State:
    return Free()


@rule("randperm")
def _shuffle(flow: Flow, node: Node, a: Arguments) -> State:
    return flow.couple(node, "it shuffles the samples of the batch") if flow.sizes.grows(node) else Free()


@rule("linspace logspace eye tril_indices triu_indices")
def _position_made(flow: Flow, node: Node, a: Arguments) -> State:
    if flow.sizes.grows(node):
        return flow.couple(node, "the values depend on where a sample stands in the batch")
    return Free()


# --- contractions ------------------------------------------------------------------------------------------------


@rule("linear")
def _linear(flow: Flow, node: Node, a: Arguments) -> State:
    lead = [f"b{index}" for index in range(flow.rank(a["input"]) - 1)]
    result = [*lead, "o"] if flow.rank(a["weight"]) == 2 else lead
    operands = [(a["input"], [*lead, "i"]), (a["weight"], ["o", "i"][2 - flow.rank(a["weight"]) :])]
    return combine(flow, node, [*operands, (a.get("bias"), ["o"])], result)


@rule("matmul mm bmm mv dot vdot inner")
def _matmul(flow: Flow, node: Node, a: Arguments) -> State:
    left, right = tensors(node.args)
    return combine(flow, node, *_matmul_labels(flow, left, right))


def _matmul_labels(flow: Flow, left: Node, right: Node) -> tuple[list[tuple[Any, list[Any]]], list[Any]]:
    rank_left, rank_right = flow.rank(left), flow.rank(right)
    lead_left, lead_right = list(range(2 - rank_left, 0)), list(range(2 - rank_right, 0))
    rows, columns = (["n"] if rank_left > 1 else []), (["m"] if rank_right > 1 else [])
    operands = [(left, [*lead_left, *rows, "k"]), (right, [*lead_right, "k", *columns])]
    return operands, [*max(lead_left, lead_right, key=len), *rows, *columns]


@rule("addmm baddbmm addbmm addmv")
def _addmm(flow: Flow, node: Node, a: Arguments) -> State:
    added, left, right = tensors(node.args)
    operands, result = _matmul_labels(flow, left, right)
    return combine(flow, node, [(added, result[len(result) - flow.rank(added) :]), *operands], result)


@rule("outer ger")
def _outer(flow: Flow, node: Node, a: Arguments) -> State:
    left, right = tensors(node.args)
    return combine(flow, node, [(left, ["n"]), (right, ["m"])], ["n", "m"])


@rule("einsum")
def _einsum(flow: Flow, node: Node, a: Arguments) -> State:
    equation = a["equation"].replace(" ", "")
    inputs, _, result = equation.partition("->")
    values = tensors([a["tensors"]])
    letters = [_letters(labels, flow.rank(value)) for labels, value in zip(inputs.split(","), values, strict=True)]
    if "->" not in equation:
        every = [letter for labels in letters for letter in labels]
        once = sorted({letter for letter in every if every.count(letter) == 1 and isinstance(letter, str)})
        dots = max((tuple(x for x in labels if isinstance(x, int)) for labels in letters), key=len)
        return combine(flow, node, list(zip(values, letters, strict=True)), [*dots, *once])
    return combine(flow, node, list(zip(values, letters, strict=True)), _letters(result, flow.rank(node)))


def _letters(labels: str, rank: int) -> list[Any]:
    before, dots, after = labels.partition("...")
    missing = rank - len(before) - len(after) if dots else 0
    return [*before, *range(-missing, 0), *after]


@rule(
    """
    scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    """
)
def _attention(flow: Flow, node: Node, a: Arguments) -> State:
    lead = list(range(2 - flow.rank(a["query"]), 0))
    mask = a.get("attn_mask")
    mask_labels = [*range(2 - flow.rank(mask), 0), "t", "s"] if mask is not None else []
    operands = [(a["query"], [*lead, "t", "d"]), (a["key"], [*lead, "s", "d"]), (a["value"], [*lead, "s", "e"])]
    return combine(flow, node, [*operands, (mask, mask_labels)], [*lead, "t", "e"], fixed={"s", "d"})


def _recurrent(flow: Flow, node: Node, a: Arguments) -> State:
    """lstm, gru, rnn: input [B, T, E] or [T, B, E], initial states [layers, B, H]."""
    value = a["input"]
    unbatched = flow.rank(value) == 2
    labels = ["t", "e"] if unbatched else ["b", "t", "e"] if a["batch_first"] else ["t", "b", "e"]
    operands = [(value, labels), *((hidden, ["l", "b", "h"]) for hidden in tensors([a["hx"]]) if not unbatched)]
    out = combine(flow, node, operands, labels, fixed={"t", "e", "l", "h"})
    last = moved(out, 1)
    return (out, *(last for _ in node.meta["val"][1:]))


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    rule(_name)(_recurrent)


# --- windows and normalisation ------------------------------------------------------------------------------------


@rule(
    """
    conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv2d_padding
    _convolution group_norm native_group_norm pixel_shuffle pixel_unshuffle channel_shuffle grid_sampler
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool2d max_pool3d max_pool2d_with_indices max_pool1d_with_indices max_pool3d_with_indices fold col2im
    lp_pool2d fractional_max_pool2d _upsample_nearest_exact2d local_response_norm
    """
)
def _first_dimension_only(flow: Flow, node: Node, a: Arguments) -> State:
    """Samples are rows of dimension 0; every other dimension is worked across. Parameters carry no batch."""
    value, *others = tensors(node.args)
    operands: list[tuple[Any, list[Any]]] = [(value, list(range(flow.rank(value))))]
    if "grid" in a:
        operands.append((a["grid"], [0, *(f"g{index}" for index in range(1, flow.rank(a["grid"])))]))
    elif any(isinstance(flow.state(other), PerRow) for other in others):
        return flow.couple(node, "its weights are made from the samples of the batch")
    rank = flow.rank(value)
    fixed = {*range(1, rank), *(f"g{index}" for index in range(1, 6))}
    state = combine(flow, node, operands, range(rank), fixed=fixed)
    return tuple(state for _ in node.meta["val"]) if isinstance(node.meta["val"], (tuple, list)) else state


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def _layer_norm(flow: Flow, node: Node, a: Arguments) -> State:
    value = node.args[0]
    rank, normalised = flow.rank(value), len(a["normalized_shape"])
    parameters = [(a.get(name), range(rank - normalised, rank)) for name in ("weight", "bias")]
    state = combine(
        flow, node, [(value, range(rank)), *parameters], range(rank), fixed=set(range(rank - normalised, rank))
    )
    return (state, state, state) if isinstance(node.meta["val"], (tuple, list)) else state


@rule("batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm _batch_norm_impl_index")
def _batch_norm(flow: Flow, node: Node, a: Arguments) -> State:
    value = node.args[0]
    state = flow.state(value)
    training = a.get("training", a.get("train", True))
    if isinstance(state, PerRow) and training and state.dim != 1:
        flow.couple(node, "batch normalisation in training takes its statistics over the batch")
        return state
    if isinstance(state, (Free, Mixed, Rows)):
        return state
    return flow.couple(node, "the values depend on where a sample stands in the batch")


@rule("instance_norm")
def _instance_norm(flow: Flow, node: Node, a: Arguments) -> State:
    value = node.args[0]
    state = flow.state(value)
    if isinstance(state, Rows) and (a["use_input_stats"] and a.get("running_mean") is not None):
        flow.couple(node, "its running statistics are averages over the batch")
        return state
    return combine(flow, node, [(value, range(flow.rank(value)))], range(flow.rank(value)), fixed={2, 3, 4})


# --- across one dimension ------------------------------------------------------------------------------------------


def _all_dimensions(flow: Flow, node: Node, dims: Any) -> list[int]:
    rank = flow.rank(node.args[0])
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims])] if rank else []


def _reduce(flow: Flow, node: Node, a: Arguments, *, mean: bool | None) -> State:
    value = node.args[0]
    rank, dims = flow.rank(value), _all_dimensions(flow, node, a.get("dim"))
    state = flow.rows(value)
    if isinstance(state, PerRow) and state.dim in dims and mean is not None:
        if isinstance(state, Rows):
            return flow.reduced(node, state.order, mean=mean)
        return flow.couple(node, "the values depend on where a sample stands in the batch")
    kept = list(range(rank)) if a.get("keepdim") else [dim for dim in range(rank) if dim not in dims]
    state = combine(flow, node, [(value, range(rank))], kept, fixed=set(dims))
    outputs = node.meta["val"]
    return tuple(state for _ in outputs) if isinstance(outputs, (tuple, list)) else state


@rule("sum")
def _sum(flow: Flow, node: Node, a: Arguments) -> State:
    return _reduce(flow, node, a, mean=False)


@rule("mean")
def _mean(flow: Flow, node: Node, a: Arguments) -> State:
    return _reduce(flow, node, a, mean=True)


@rule(
    """
    amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp linalg_vector_norm norm
    median nanmedian count_nonzero nanmean nansum mode kthvalue aminmax
    """
)
def _other_reduction(flow: Flow, node: Node, a: Arguments) -> State:
    if isinstance(a.get("other"), Node):
        return pointwise(flow, node, a)
    return _reduce(flow, node, a, mean=None)


@rule(
    """
    softmax log_softmax _softmax _log_softmax softmin cumsum cumprod logcumsumexp cummax cummin topk diff glu
    flip roll renorm trapezoid gumbel_softmax fft_fft fft_rfft fft_ifft fft_irfft msort
    """
)
def _across(flow: Flow, node: Node, a: Arguments) -> State:
    """One dimension (or ``dims``) is worked across, the others are rows apart."""
    dims = a.get("dims", a.get("dim", -1))
    return across(flow, node, _all_dimensions(flow, node, dims))


def across(flow: Flow, node: Node, dims: list[int]) -> State:
    labelled = [(value, range(flow.rank(value))) for value in tensors(node.args) if flow.rank(value)]
    rank = flow.rank(node.args[0])
    state = combine(flow, node, labelled, range(rank), fixed=set(dims))
    outputs = node.meta["val"]
    return tuple(state for _ in outputs) if isinstance(outputs, (tuple, list)) else state


@rule(
    """
    tril triu fft_fft2 fft_rfft2 fft_ifft2 fft_irfft2 linalg_inv cholesky linalg_solve linalg_matrix_exp
    matrix_exp linalg_det logdet trace cdist _cdist_forward linalg_qr linalg_svd linalg_cholesky linalg_eigh
    diagonal diag_embed
    """
)
def _last_two(flow: Flow, node: Node, a: Arguments) -> State:
    values = tensors(node.args)
    lead = max(flow.rank(value) for value in values) - 2
    operands = [(value, [*range(2 - flow.rank(value), 0), f"r{index}", "c"]) for index, value in enumerate(values)]
    fixed = {"c", *(f"r{index}" for index in range(len(values)))}
    outputs = node.meta["val"]
    state = combine(flow, node, operands, range(-lead, 0), fixed=fixed)
    return tuple(state for _ in outputs) if isinstance(outputs, (tuple, list)) else state


@rule("cosine_similarity pairwise_distance")
def _pairs(flow: Flow, node: Node, a: Arguments) -> State:
    values = tensors(node.args)
    rank = max(flow.rank(value) for value in values)
    dim = a.get("dim", -1) % rank - rank
    operands = [(value, range(-flow.rank(value), 0)) for value in values]
    kept = [index for index in range(-rank, 0) if index != dim or a.get("keepdim")]
    return combine(flow, node, operands, kept, fixed={dim})


@rule("embedding")
def _embedding(flow: Flow, node: Node, a: Arguments) -> State:
    if a.get("scale_grad_by_freq"):
        return flow.couple(node, "gradients are scaled by how often an index comes in the batch")
    lead = [f"b{index}" for index in range(flow.rank(a["indices"]))]
    return combine(flow, node, [(a["weight"], ["v", "e"]), (a["indices"], lead)], [*lead, "e"], fixed={"v"})


@rule("one_hot")
def _one_hot(flow: Flow, node: Node, a: Arguments) -> State:
    rank = flow.rank(node.args[0])
    return combine(flow, node, [(node.args[0], range(rank))], range(rank + 1))


@rule("gather scatter scatter_add scatter_reduce take_along_dim")
def _gather(flow: Flow, node: Node, a: Arguments) -> State:
    return across(flow, node, [a["dim"] % flow.rank(node.args[0])])


def getitem(flow: Flow, node: Node) -> State:
    """Python's ``[]`` on an operator's tuple of results."""
    state = flow.state(node.args[0])
    if isinstance(state, tuple):
        return state[operator.index(node.args[1])]  # type: ignore[arg-type]
    return state


def shape_guess(flow: Flow, node: Node) -> State:
    """An operator without a rule: taken as per sample where the batch stays the dimension it is, and noted."""
    found = []
    for value in tensors(node.args):
        state = flow.state(value)
        if isinstance(state, PerRow):
            found.append((Rows(dim=state.dim, order=state.order), flow.shape(value)[state.dim]))
        elif not isinstance(state, Free):
            return flow.couple(node, "it is not known whether this operator keeps samples apart")
    if not found:
        return Free()
    rows, size = found[0]
    outputs = node.meta.get("val")
    single = isinstance(outputs, Tensor)
    for output in [outputs] if single else list(outputs or ()):
        stays = isinstance(output, Tensor) and [i for i, n in enumerate(flow.shape(output)) if n == size] == [rows.dim]
        if not stays or len(set(found)) != 1:
            return flow.couple(node, "it is not known whether this operator keeps samples apart")
    flow.note(f"{node.target} is taken to work on each sample by itself: its batch dimension stays where it is")
    return rows if single else tuple(rows for _ in outputs or ())

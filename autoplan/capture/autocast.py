"""``with torch.autocast(...)`` in a forward: its casts become operators of the graph.

Autocast works below the level at which torch.export records, and would come out as a region around uncast operators.
Here it is done at that level, while the forward is under trace: in front of every operator on autocast's lists stand
the ``to`` that it would make there, so that Python in the forward reads the dtypes it would read, costs see them, and
a stage may begin anywhere in a region. Before and after, for float32 ``x`` and ``w``::

    with autocast("cuda", bfloat16):                 to = x.to(bfloat16); to_1 = w.to(bfloat16)
        loss = mse_loss(linear(x, w), y)             linear(to, to_1); linear.to(float32); mse_loss(...)

As autocast's cache has it, a parameter is cast once a region, and its uses add their gradients in the low precision.
Float64 is never cast. Operators that are made of listed ones are taken apart into them, and recurrent layers, whose
kernels cast on their own, are refused.

A region acts if it is for the device that the program will run on. One for the device of the trace counts as that:
``x.device.type`` says "cpu" or "meta" while a model bound for GPUs is traced.

The lists are torch 2.13's: of CUDA the macros of ATen/autocast_mode.h and the registrations of
aten/src/ATen/autocast_mode.cpp, where those of CPUs are too. Tests compare both with torch's own dispatcher.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from autoplan.capture.errors import current_line
from autoplan.errors import CaptureError

aten = torch.ops.aten

_LOW = (
    "addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input linalg_vecdot linear matmul mm prelu scaled_dot_product_attention _convolution.deprecated"
)
_LOW_CPU = "_addmm_activation conv1d.padding conv2d.padding conv3d.padding"
_LOW_CUDA = (
    "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addmv addr "
    "chain_matmul convolution einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell rnn_tanh_cell"
)
_WIDE = (
    "binary_cross_entropy_with_logits cdist cosine_embedding_loss cross_entropy_loss hinge_embedding_loss huber_loss "
    "kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d "
    "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss"
)
_WIDE_CPU = (
    "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d "
    "binary_cross_entropy cholesky cholesky_inverse cholesky_solve ctc_loss.IntList ctc_loss.Tensor "
    "fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft "
    "fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf "
    "grid_sampler grid_sampler_2d grid_sampler_3d inverse linalg_cholesky linalg_cholesky_ex linalg_cond "
    "linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv "
    "linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float "
    "linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd "
    "linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve max_pool3d max_unpool2d max_unpool3d "
    "multilabel_margin_loss_forward nanquantile nanquantile.scalar orgqr ormqr pinverse polar prod prod.dim_int qr "
    "quantile quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "replication_pad3d stft stft.center svd trace triangular_solve view_as_complex"
)
_WIDE_CUDA = (
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm "
    "layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist pow.Scalar "
    "pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d "
    "upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_trilinear3d"
)
_RESULT_CUDA = (
    "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int norm.Scalar "
    "norm.ScalarOpt_dim prod prod.dim_int softmax.int sum sum.dim_IntList"
)
_PROMOTE_CPU = "cat index_copy stack"
_PROMOTE_CUDA = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"


def _table(**lists: str) -> Mapping[str, str]:
    return {name: policy for policy, names in lists.items() for name in names.split()}


# What autocast does to an operator's inputs, by its name and overload. "low": to the region's dtype; "wide": to
# float32; "result": the first to float32, unless the call says its result's dtype; "promote": to the widest of them.
POLICIES: Mapping[str, Mapping[str, str]] = {
    "cpu": _table(low=f"{_LOW} {_LOW_CPU}", wide=f"{_WIDE} {_WIDE_CPU}", promote=_PROMOTE_CPU),
    "cuda": _table(low=f"{_LOW} {_LOW_CUDA}", wide=f"{_WIDE} {_WIDE_CUDA}", result=_RESULT_CUDA, promote=_PROMOTE_CUDA),
}
# Made of listed operators where not listed themselves. A cross entropy on GPUs is a log_softmax and an nll_loss, both
# in float32: there it is as good as listed.
_COMPOSED = (
    "bilinear chain_matmul corrcoef cosine_similarity cov cumulative_trapezoid einsum float_power gru_cell inner istft "
    "linalg_matmul linalg_matrix_power linalg_multi_dot linalg_norm lstm_cell matrix_power nanmean nll_loss_nd "
    "norm_except_dim pairwise_distance rnn_relu_cell rnn_tanh_cell square tensordot trapezoid"
)
_KERNELS = "casts within its kernels, which no operators around it repeat"
REFUSED = {
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), _KERNELS),
    **dict.fromkeys(("mkldnn_rnn_layer", "_native_multi_head_attention"), _KERNELS),
    "binary_cross_entropy": "is what autocast itself refuses on GPUs: take binary_cross_entropy_with_logits",
}


_KEPT, _KEPT_HOW = "autocast to ", " is kept: its casts are operators of the graph"


def kept_regions(notes: Sequence[str]) -> tuple[str, ...]:
    """Of a capture's notes the regions that were kept, as ``autocast to bfloat16 at FILE:LINE ...``."""
    return tuple(note.removesuffix(_KEPT_HOW) for note in notes if note.startswith(_KEPT))


@contextmanager
def cast_in_trace(traced_on: str, runs_on: str | None, notes: list[str]) -> Iterator[None]:
    """Inside, autocast is written out. ``traced_on``: the device of the trace's tensors; ``runs_on``: the program's,
    by default the trace's own, and GPUs for a model on meta."""
    target = runs_on or ("cuda" if traced_on == "meta" else traced_on)
    casts = _Casts(target, notes)
    enter, leave, make = torch.autocast.__enter__, torch.autocast.__exit__, torch.autocast.__init__
    dispatch = ProxyTorchDispatchMode.__torch_dispatch__

    def made(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        # a machine without GPUs turns their regions off, and one that traces for others must not
        with (
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: target != "cuda"),
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_: True),
        ):
            make(self, target if device_type == traced_on else device_type, *args, **kwargs)
        if kwargs.get("cache_enabled", args[2] if len(args) > 2 else None) is False:
            casts.without_cache.add(self)

    def entered(self: torch.autocast) -> Any:
        if self.device == traced_on:  # made before the trace: a decorator's
            self.device = target
        casts.enter(self)
        with torch._C.DisableTorchFunction():  # where torch.export would open a region
            return enter(self)

    def left(self: torch.autocast, *error: Any) -> Any:
        casts.leave()
        with torch._C.DisableTorchFunction():
            return leave(self, *error)

    def dispatched(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled(target) or getattr(function, "namespace", "") != "aten":
            return dispatch(mode, function, types, args, kwargs)
        if casts.is_composed(function):
            with mode:
                return function.decompose(*args, **kwargs)
        args, kwargs = casts.cast(mode, function, args, kwargs)
        return dispatch(mode, function, types, args, kwargs)

    with (
        mock.patch.object(torch.autocast, "__init__", made),
        mock.patch.object(torch.autocast, "__enter__", entered),
        mock.patch.object(torch.autocast, "__exit__", left),
        mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", dispatched),
    ):
        yield


class _Casts:
    """Autocast's decisions for one device, and its cache of cast parameters."""

    def __init__(self, device: str, notes: list[str]) -> None:
        self._device = device
        self._policies = POLICIES.get(device, {})
        self._composed = {*_COMPOSED.split()} | {name.partition(".")[0] for name in self._policies}
        self._notes = notes
        self._regions: list[torch.autocast] = []
        # torch turns its own cache off while it traces, so that regions can't be asked
        self.without_cache: weakref.WeakSet[torch.autocast] = weakref.WeakSet()
        self._cache: dict[tuple[int, torch.dtype, bool], tuple[Tensor, Tensor]] = {}

    def enter(self, region: torch.autocast) -> None:
        self._regions.append(region)
        if region.device != self._device or not region._enabled:
            return
        if not self._policies:
            raise _refusal(f"forward casts by torch.autocast({self._device!r})")
        note = f"{_KEPT}{str(region.fast_dtype).removeprefix('torch.')} at {current_line()}{_KEPT_HOW}"
        if note not in self._notes:
            self._notes.append(note)

    def leave(self) -> None:
        self._regions.pop()
        if not self._regions:
            self._cache.clear()

    def is_composed(self, function: Any) -> bool:
        """Whether it has listed operators inside, and is not listed itself."""
        name = _name(function)
        return name not in self._policies and name.partition(".")[0] in self._composed and function._can_decompose()

    def cast(self, mode: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The operands as autocast would hand them on."""
        name = _name(function)
        policy = self._policies.get(name)
        if policy is None:
            reason = REFUSED.get(name.partition(".")[0])
            if reason is not None:
                raise _refusal(f"`{name.partition('.')[0]}` in a region of torch.autocast {reason}")
            return args, kwargs
        low = torch.get_autocast_dtype(self._device)
        if policy == "result":
            if _says_dtype(args, kwargs):
                return args, kwargs
            return (self._to(mode, args[0], torch.float32), *args[1:]), kwargs
        dtype = low if policy == "low" else torch.float32
        if policy == "promote":
            dtype = torch.float32 if torch.float32 in _dtypes((args, kwargs)) else low
        return self._to(mode, args, dtype), self._to(mode, kwargs, dtype)

    def _to(self, mode: Any, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._to(mode, item, dtype) for item in value)
        if isinstance(value, dict):
            return {key: self._to(mode, item, dtype) for key, item in value.items()}
        if not isinstance(value, Tensor) or not _is_eligible(value) or value.dtype == dtype:
            return value
        if not self._is_kept(value, dtype):
            with mode:
                return aten.to.dtype(value, dtype)
        key = (id(value), dtype, torch.is_grad_enabled())
        if key not in self._cache:
            with mode:
                self._cache[key] = (value, aten.to.dtype(value, dtype))
        return self._cache[key][1]

    def _is_kept(self, value: Tensor, dtype: torch.dtype) -> bool:
        """What autocast's cache keeps: a parameter's cast to the low precision."""
        return (
            not (self._regions and self._regions[-1] in self.without_cache)
            and dtype == torch.get_autocast_dtype(self._device)
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
        )


def _name(function: Any) -> str:
    base = function._schema.name.removeprefix("aten::")
    return f"{base}.{function._overloadname}" if function._overloadname not in ("", "default") else base


def _is_eligible(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype != torch.float64


def _dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, (tuple, list)):
        return {dtype for item in value for dtype in _dtypes(item)}
    if isinstance(value, dict):
        return _dtypes(list(value.values()))
    return {value.dtype} if isinstance(value, Tensor) and _is_eligible(value) else set()


def _says_dtype(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        what,
        where=current_line(),
        legal="regions of torch.autocast for CPUs or CUDA, around operators other than recurrent layers",
        attempt="take this out of the region (with torch.autocast(..., enabled=False)), and cast with .to(dtype)",
    )

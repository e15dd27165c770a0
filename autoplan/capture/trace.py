"""An nn.Module and one batch to one fx graph, by torch.export without running anything.

Real parameters are traced on their own device, parameters on ``meta`` (or a cast to ``dtype``) through a shadow of the
model on meta. The batch is a symbol; where the model fixes its batch size, the graph is static at the example's.
What is exported is a small wrapper that takes the batch's tensors, calls the model as the user would, and picks the
loss out of whatever it returns: so any Python structure may go in and come out.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from autoplan.capture import batch as batches
from autoplan.capture import hooks, huggingface, lines, side_effects
from autoplan.capture.autocast import cast_in_trace
from autoplan.capture.batch_paths import one_path
from autoplan.capture.checkpointing import marked_regions
from autoplan.capture.errors import trace_failure
from autoplan.capture.folding import Folding
from autoplan.capture.guard import Watch, untouched, watched
from autoplan.capture.noticed import Noticed
from autoplan.capture.output import pick_loss
from autoplan.capture.reassigned import Tables
from autoplan.capture.second_call import calls_before
from autoplan.capture.shapes import MAX_BATCH
from autoplan.errors import CaptureError
from autoplan.uncollected import uncollected

MODEL_PREFIX = "model"
LOSS_PREFIX = "loss_fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """torch.export's graph as it came, with what was noticed on the way."""

    graph_module: GraphModule
    dynamic_batch: bool
    notes: tuple[str, ...]


class CallAndLoss(nn.Module):
    """``forward(*tensors)``: the batch's tensors in order, to the scalar loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, batch: Any) -> None:
        super().__init__()
        # set past nn.Module's bookkeeping: a loss module becomes a child, a plain function an attribute
        self.model = model
        self.loss_fn = loss_fn
        self.example = [batch]
        self.paths = list(batches.tensors(batch))
        self.training = model.training
        self.watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self.traced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.calls = 1
        self.noticed: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = batches.replace_leaves(self.example[0], dict(zip(self.paths, tensors, strict=True)))
        call = batches.bind(self.model, batch, self.loss_fn)
        tables = Tables(self.model)
        with self.watch, self.traced(), self.noticed():
            for index in range(self.calls):
                with tables.kept(), calls_before() if index + 1 < self.calls else contextlib.nullcontext():
                    output = self.model(*call.args, **call.kwargs)
                    if self.loss_fn is not None:
                        output = self.loss_fn(output, *call.loss_args, **(call.loss_kwargs or {}))
        return pick_loss(output, self.model, self.loss_fn)


def trace(
    model: nn.Module,
    batch: Any,
    found: Mapping[batches.Path, Tensor],
    loss_fn: Callable[..., Any] | None,
    dtype: torch.dtype | None,
    folding: Folding | None = None,
    device: str | None = None,
) -> Traced:
    """Trace ``model`` on ``batch`` (whose tensors are ``found``) to its loss, inside ``folding`` if one is given.
    ``device``: where the program will run, as autocast counts it ("cpu", "cuda"); None: where the model is."""
    notes: list[str] = []
    wrapper = CallAndLoss(model, loss_fn, batch)
    size = batches.batch_size(found)
    arguments = batches.arguments(model, batches.bind(model, batch, loss_fn))
    for module in (model, loss_fn):
        if isinstance(module, nn.Module):
            hooks.check_registered(module)
    shadow = needs_shadow(wrapper, dtype)
    inputs = _place(found.values(), model, shadow, dtype)
    noticed = Noticed(model, loss_fn)
    with (
        contextlib.nullcontext() if folding is None else folding.hollowed(),
        untouched(wrapper),
        huggingface.prepared(model, arguments, notes),
        watched(notes) as refusals,
        marked_regions(notes),
        lines.of_operators(),
        cast_in_trace("meta" if shadow else _device_type(model), device, notes),
        _on_meta(wrapper, dtype) if shadow else contextlib.nullcontext(),
        torch.device("meta") if shadow else contextlib.nullcontext(),
        torch.enable_grad(),
        _silence(),
        uncollected(),
        noticed.watched(),
    ):
        wrapper.watch = Watch(refusals, model)
        wrapper.noticed = noticed.forward
        if folding is not None:
            wrapper.traced = folding.traced

        def again(calls: int) -> GraphModule:
            wrapper.calls = calls
            try:
                with untouched(wrapper), contextlib.redirect_stdout(io.StringIO()):
                    return _export(wrapper, inputs, size, [])[0]
            finally:
                wrapper.calls = 1

        try:
            with untouched(wrapper):
                graph_module, dynamic = _export(wrapper, inputs, size, notes)
            if folding is not None and (noticed.may_differ or noticed.draws or noticed.sources.entropy):
                # it knows each kind of block by its first call: the whole trace tells
                raise side_effects.state_refusal(noticed, model, again)
            notes.extend(side_effects.check(noticed, model, graph_module, again))
        except CaptureError:
            raise
        except Exception as error:
            if refusals:
                raise refusals[0] from None
            raise trace_failure(error, model) from error
    return Traced(graph_module=graph_module, dynamic_batch=dynamic, notes=tuple(dict.fromkeys(notes)))


def _device_type(model: nn.Module) -> str:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device.type if tensors else "cpu"


def needs_shadow(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether to trace a stand-in on meta: a parameter is there already, or has another dtype than asked for."""
    return any(
        parameter.is_meta or (dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype)
        for parameter in model.parameters()
    )


def _export(wrapper: CallAndLoss, inputs: list[Tensor], size: int, notes: list[str]) -> tuple[GraphModule, bool]:
    """Dynamic in the batch; static where that fails. The first failure is the one worth telling."""
    batched = [tensor.dim() > 0 and tensor.shape[0] == size for tensor in inputs]

    def dynamic(least: int, most: int) -> GraphModule:
        return _export_dynamic(wrapper, inputs, batched, range(least, most + 1))

    try:
        return dynamic(1, MAX_BATCH), True
    except CaptureError:
        raise
    except Exception as error:
        first = error
    whole = one_path(first, dynamic)
    if whole is not None:
        return whole, True
    try:
        graph_module = _module(torch.export.export(wrapper, tuple(inputs), strict=False))
    except Exception:
        raise first from None
    notes.append(f"the batch size is fixed at the example's {size}: {_reason(first)}")
    return graph_module, False


# How torch says that a dimension that was to be free is a number.
_MADE_CONSTANT = "specialized it to be a constant"


def _reason(error: Exception) -> str:
    """Why a batch is not free, by torch's message: in our words, or the first constraint that does not hold, or else
    the message's first line."""
    if _MADE_CONSTANT in str(error):
        return "the model makes a number of it (a size that is written out, or read with int())"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    constraints = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return f"with a free one, {(constraints or lines or [type(error).__name__])[0].partition('. ')[0]}"


def _export_dynamic(wrapper: CallAndLoss, inputs: list[Tensor], batched: list[bool], sizes: range) -> GraphModule:
    # torch takes a dimension of 1 for a constant (broadcasting): an example of one sample is traced as two
    traced = range(max(2, sizes.start), sizes.stop)
    rows = [
        _resized(tensor, traced) if is_batched else tensor for tensor, is_batched in zip(inputs, batched, strict=True)
    ]
    dimension = Dim("batch", min=sizes.start, max=sizes.stop - 1)
    shapes = tuple({0: dimension} if is_batched else None for is_batched in batched)
    return _module(torch.export.export(wrapper, tuple(rows), dynamic_shapes={"tensors": shapes}, strict=False))


def _resized(tensor: Tensor, sizes: range) -> Tensor:
    """The example's samples, no more than the sizes allow, and over again where they ask for more."""
    times = -(-sizes.start // len(tensor))
    return torch.cat([tensor] * max(1, times))[: sizes.stop - 1]


def _module(program: torch.export.ExportedProgram) -> GraphModule:
    return program.module(check_guards=False)


def _place(found: Any, model: nn.Module, shadow: bool, dtype: torch.dtype | None) -> list[Tensor]:
    """The example's tensors where the trace runs."""
    devices = {parameter.device for parameter in model.parameters()}
    target = torch.device("meta") if shadow else next(iter(devices)) if len(devices) == 1 else None
    placed = []
    for tensor in found:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        placed.append(tensor.detach().to(device=target or tensor.device, dtype=cast))
    return placed


@contextlib.contextmanager
def _on_meta(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters and buffers swapped for meta ones, cast as ``model.to(dtype)`` casts; ties stay ties.

    ``untouched`` around it puts the real ones back.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = _stand_in(tensor, dtype, made)
    yield


def stand_ins(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Tensors on meta, cast as ``module.to(dtype)`` casts; ties stay ties."""
    made: dict[int, Tensor] = {}
    return {name: _stand_in(tensor, dtype, made) for name, tensor in tensors.items()}


def _stand_in(tensor: Tensor, dtype: torch.dtype | None, made: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in made:
        cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        meta = (
            tensor if tensor.is_meta and tensor.dtype == cast else torch.empty_like(tensor, device="meta", dtype=cast)
        )
        if isinstance(tensor, nn.Parameter) and meta is not tensor:
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        made[id(tensor)] = meta
    return made[id(tensor)]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """torch dumps partial graphs, logs and warns while it fails; the one message comes from the error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

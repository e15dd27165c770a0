"""Regions of torch.autocast: the graph's casts are those that autocast makes, in every dtype and number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import Capture, capture
from autoplan.capture.autocast import POLICIES, REFUSED
from autoplan.errors import CaptureError
from tests.support.captures import line_of

BF16 = torch.bfloat16
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Kitchen(nn.Module):
    """Operators of every policy, composed ones, an island without autocast, a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.outer = nn.Linear(16, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=BF16):  # the region
            y = F.gelu(self.norm(self.inner(x)))
            with torch.autocast(x.device.type, enabled=False):
                y = y.float() * 2
            heads = y.view(-1, 1, 2, 8)
            y = F.scaled_dot_product_attention(heads, heads, heads).reshape(-1, 16)
            y = self.outer(y) * self.outer(y.sin())
            y = self.encoder(y[:, None])[:, 0]
            y = torch.einsum("bi,oi->bo", y, self.outer.weight.T[:8])
            y = y + self.cell(y.to(x.dtype))[0]
            z = torch.stack([y.float(), y.softmax(-1)])
            return F.mse_loss(y, x) + z.mean() + F.cross_entropy(y, x.argmax(-1))


def dtypes(captured: Capture, name: str) -> list[torch.dtype]:
    """Of the results of all operators called so."""
    nodes = captured.graph_module.graph.nodes
    return [node.meta["val"].dtype for node in nodes if re.fullmatch(rf"{name}(_\d+)?", node.name)]


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_the_captured_graph_computes_what_eager_does_under_autocast_to_the_last_bit() -> None:
    torch.manual_seed(0)
    model = Kitchen()
    captured = capture(model, X)
    theirs, ours = model(X), captured.graph_module(X)
    assert torch.equal(ours, theirs)
    expected = gradients(theirs, model)
    found = gradients(ours, model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert captured.dynamic_batch
    line = line_of(__file__, "the region")
    assert any(note.startswith(f"autocast to bfloat16 at {line} in forward") for note in captured.notes)


class Region(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=BF16):
            return F.mse_loss(self.layer(x), x)


@pytest.mark.parametrize(("model", "x"), [(Region("cpu").double(), X.double()), (Region("cuda"), X)])
def test_nothing_is_cast_in_float64_nor_in_regions_of_another_device(model: nn.Module, x: Tensor) -> None:
    captured = capture(model, x)
    assert torch.ops.aten.to.dtype not in {node.target for node in captured.graph_module.graph.nodes}
    assert torch.equal(captured.graph_module(x), model(x))


def test_a_program_for_gpus_gets_their_lists_wherever_it_is_traced() -> None:
    """On GPUs a layer norm and a softmax are float32; a model on the CPU or on meta is traced for them."""
    for model, device in ((Kitchen(), "cuda"), (Kitchen().to("meta"), None)):
        captured = capture(model, X, device=device)
        assert set(dtypes(captured, "layer_norm")) == {torch.float32}
        assert dtypes(captured, "softmax") == [torch.float32]
        assert set(dtypes(captured, "linear")) == {BF16}
        assert dtypes(captured, "einsum") == [BF16]
    assert set(dtypes(capture(Kitchen(), X), "layer_norm")) == {BF16}, "CPUs leave a layer norm as it comes"


def test_a_weight_is_cast_once_a_region() -> None:
    class Twice(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)
            self.options = options

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16, **self.options):
                x = self.layer(self.layer(x))
            with torch.autocast("cpu", BF16, **self.options):
                return self.layer(x).float().mean()

    def casts(model: nn.Module) -> int:
        graph = capture(model, X).graph_module.graph
        return sum(node.args[0].op == "get_attr" for node in graph.nodes if node.target is torch.ops.aten.to.dtype)

    assert casts(Twice()) == 2
    assert casts(Twice(cache_enabled=False)) == 3


def test_decorators_and_float16() -> None:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        @torch.autocast("cpu", dtype=torch.float16)
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).float().mean()

    captured = capture(Decorated(), X)
    assert dtypes(captured, "linear") == [torch.float16]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            y, _ = self.layer(x[:, None])  # recurrent in a region
        return y.float().mean()


def test_what_cannot_be_kept_is_refused_at_the_users_line() -> None:
    with pytest.raises(CaptureError, match="`lstm` in a region") as error:
        capture(Recurrent(), X)
    assert error.value.where.startswith(line_of(__file__, "recurrent in a region") + " in forward")
    assert "enabled=False" in error.value.attempt


def registered(key: str) -> set[str]:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("aten::") for name in names if has(name, key)}


def test_the_lists_are_those_of_torchs_dispatcher() -> None:
    refused = {name for name in REFUSED if name not in ("gru", "lstm", "rnn_relu", "rnn_tanh")}
    assert registered("AutocastCPU") - refused == set(POLICIES["cpu"]) - refused
    own = {"cross_entropy_loss"}  # on GPUs by its parts, which are listed
    convolutions = {"cudnn_convolution", "cudnn_convolution_transpose"}  # inside conv2d, which is listed
    assert registered("AutocastCUDA") - refused - convolutions == set(POLICIES["cuda"]) - own


def test_the_policies_of_gpus_are_those_of_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    policies = {
        "AT_FORALL_LOWER_PRECISION_FP": "low",
        "AT_FORALL_FP32": "wide",
        "AT_FORALL_FP32_SET_OPT_DTYPE": "result",
        "AT_FORALL_PROMOTE": "promote",
    }
    compared = 0
    for macro, policy in policies.items():
        body = header.split(f"#define {macro}(_)")[1].split("#")[0]
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
            full = f"{name}.{overload}" if overload else name
            if full in POLICIES["cuda"]:  # some are other devices' alone
                assert POLICIES["cuda"][full] == policy, full
                compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("low", lambda x: F.conv1d(x[:, None], x[:2, None])),
        ("low", lambda x: torch.bmm(x[None], x.T[None])),
        ("low", lambda x: torch.baddbmm(x[None, :, :6], x[None], x.T[None])),
        ("low", lambda x: F.prelu(x, x[0, :1])),
        ("wide", lambda x: F.l1_loss(x.to(BF16), x.to(BF16))),
        ("wide", lambda x: F.binary_cross_entropy_with_logits(x.to(BF16), x.to(BF16))),
        ("wide", lambda x: F.kl_div(x.to(BF16), x.to(BF16).abs())),
        ("wide", lambda x: x.to(BF16).prod(1)),
        ("promote", lambda x: torch.cat([x, x.to(BF16)])),
        ("promote", lambda x: torch.stack([x.to(BF16), x])),
        ("none", lambda x: x.to(BF16).exp() + x.to(BF16).sum()),
        ("composed", lambda x: torch.inner(x, x)),
        ("composed", lambda x: torch.tensordot(x, x, dims=([1], [1]))),
        ("composed", lambda x: F.conv1d(x[:, None], x[:2, None, :3], padding="same")),
    ],
)
def test_operators_come_out_as_torch_casts_them(name: str, call: Any) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=BF16):
                result = call(x * self.scale)
            return result.double().mean() if result.dtype == BF16 else result.mean()

    model = Calls()
    captured = capture(model, X)
    theirs = model(X)
    assert captured.graph_module(X).dtype == theirs.dtype
    assert torch.equal(captured.graph_module(X), theirs)
    found, expected = gradients(captured.graph_module(X), model), gradients(theirs, model)
    assert torch.equal(found["scale"], expected["scale"])

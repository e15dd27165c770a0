"""MODEL resolution: what a preset, a config.json and a factory become, and what each mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import ModelError
from autoplan.models import example_inputs_for, from_module, presets, resolve

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}


def write_config(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY_LLAMA | changes))
    return str(path)


def write_factory(folder: Path, body: str) -> str:
    path = folder / "user_model.py"
    path.write_text("import torch\nfrom torch import nn\n" + body)
    return f"{path}:build"


def distinct_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("entry", presets(), ids=lambda entry: entry.name)
def test_every_preset_has_its_published_parameter_count_and_costs_no_memory(entry) -> None:
    resolved = resolve(entry.name, precision="bf16", batch=1)
    assert distinct_parameters(resolved.model) == entry.parameters
    assert {p.device.type for p in resolved.model.parameters()} == {"meta"}
    assert {p.dtype for p in resolved.model.parameters()} == {torch.bfloat16}
    assert resolved.model.training and not resolved.model.config.use_cache
    assert resolved.name == entry.name


def test_a_language_models_batch_is_tokens_and_labels_without_a_mask() -> None:
    resolved = resolve("gpt2", precision="bf16", batch=3, sequence=128)
    assert {key: tuple(value.shape) for key, value in resolved.example_inputs.items()} == {
        "input_ids": (3, 128),
        "labels": (3, 128),
    }
    assert resolved.assumptions == ()


def test_an_image_classifiers_batch_is_pixels_and_classes() -> None:
    inputs = resolve("vit-large", precision="fp16", batch=2).example_inputs
    assert inputs["pixel_values"].shape == (2, 3, 224, 224) and inputs["pixel_values"].dtype == torch.float16
    assert inputs["labels"].shape == (2,)


@pytest.mark.parametrize(
    ("name", "length", "said"),
    [
        ("gpt2", 1024, "sequence length 1024 (none was given)"),
        ("llama3.1-405b", 4096, "sequence length 4096, of the model's 131072 (none was given)"),
        ("t5-large", 512, "sequence length 512 (none was given)"),
        ("opt-13b", 2048, "sequence length 2048 (none was given)"),
    ],
)
def test_the_default_sequence_is_the_maximum_capped_and_said_aloud(name: str, length: int, said: str) -> None:
    resolved = resolve(name, batch=1)
    assert resolved.example_inputs["input_ids"].shape == (1, length)
    assert resolved.assumptions == (said, "precision bf16 (none was given)")


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 1024), ("bert-large", 512), ("opt-13b", 2048)])
def test_learned_positions_end_the_sequence(name: str, limit: int) -> None:
    assert resolve(name, batch=1, sequence=limit).example_inputs["input_ids"].shape[1] == limit
    with pytest.raises(ModelError, match=f"has learned positions for {limit}"):
        resolve(name, batch=1, sequence=limit + 1)


def test_rotary_positions_go_on_and_the_user_is_told() -> None:
    assert resolve("llama2-7b", precision="bf16", batch=1, sequence=8192).assumptions == (
        "sequence length 8192 is beyond the config's 4096",
    )


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_quantised_precisions_trace_in_bf16(precision: str) -> None:
    assert resolve("gpt2", precision=precision, batch=1).model.dtype == torch.bfloat16


def test_an_unknown_precision_lists_the_legal_ones() -> None:
    with pytest.raises(ModelError, match="unknown precision 'bf61'") as caught:
        resolve("gpt2", precision="bf61", batch=1)
    assert "bf16" in caught.value.legal


def test_a_config_file_and_its_folder_are_both_models(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    for reference in (path, str(tmp_path)):
        resolved = resolve(reference, precision="fp32", batch=1)
        assert type(resolved.model).__name__ == "LlamaForCausalLM"
        assert resolved.name == tmp_path.name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertForMaskedLM"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "BertForMaskedLM"),
        ({"model_type": "t5", "d_model": 32, "num_heads": 4, "d_kv": 8}, "T5ForConditionalGeneration"),
        ({"model_type": "vit"}, "ViTForImageClassification"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_the_class_follows_architectures_and_then_the_model_type(tmp_path: Path, changes: dict, expected: str) -> None:
    resolved = resolve(write_config(tmp_path, **changes), precision="bf16", batch=1)
    assert type(resolved.model).__name__ == expected


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ('{"model_type": "llama",\n "hidden_size": }', "malformed config, not JSON", ":2:"),
        ("[1, 2]", "it holds a list, not an object", ""),
        ('{"hidden_size": 3}', "it has no `model_type`", ""),
        ('{"model_type": "lama"}', "unknown model_type 'lama'", ""),
        ('{"model_type": "llama", "architectures": ["LlamaForPoems"]}', "unknown architecture 'LlamaForPoems'", ""),
        ('{"model_type": "gpt2", "n_embd": 30, "n_head": 4}', "this config builds no model", ""),
        ('{"model_type": "llama", "hidden_size": "wide"}', "this config builds no model", ""),
        ('{"model_type": "sam"}', "has no training loss that is known here", ""),
    ],
)
def test_a_malformed_config_names_the_file_and_the_fault(tmp_path: Path, text: str, message: str, where: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        resolve(str(path), precision="bf16", batch=1)
    assert message in caught.value.what
    assert caught.value.where.startswith(str(path) + where)


def test_a_binary_or_missing_config_is_said_to_be_one(tmp_path: Path) -> None:
    binary = tmp_path / "config.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not a text file"):
        resolve(str(binary), batch=1)
    with pytest.raises(ModelError, match="cannot read the config: No such file"):
        resolve(str(tmp_path / "other.json"), batch=1)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="unknown model 'lama3-8b'") as caught:
        resolve("lama3-8b", batch=1)
    assert "llama3-8b" in caught.value.attempt


def test_a_hub_name_is_told_that_nothing_is_downloaded() -> None:
    with pytest.raises(ModelError) as caught:
        resolve("meta-llama/Llama-3-8B", batch=1)
    assert "nothing is downloaded" in caught.value.attempt


def test_a_factory_builds_on_meta_with_its_own_inputs_and_loss(tmp_path: Path) -> None:
    reference = write_factory(
        tmp_path,
        "def build():\n    return nn.Linear(1 << 20, 1 << 20), (torch.zeros(2, 1 << 20),), nn.functional.mse_loss\n",
    )
    resolved = resolve(reference, batch=2)
    assert next(resolved.model.parameters()).is_meta and resolved.example_inputs[0].is_meta
    assert resolved.loss_fn is nn.functional.mse_loss
    assert resolved.name == "build"


def test_a_factorys_own_dtype_stays_unless_a_precision_is_given(tmp_path: Path) -> None:
    reference = write_factory(tmp_path, "def build():\n    return nn.Linear(4, 4), torch.zeros(2, 4)\n")
    assert next(resolve(reference, batch=2).model.parameters()).dtype == torch.float32
    cast = resolve(reference, precision="fp8", batch=2)
    assert next(cast.model.parameters()).dtype == cast.example_inputs.dtype == torch.bfloat16


def test_a_factory_that_needs_real_numbers_gets_them_and_says_so(tmp_path: Path) -> None:
    reference = write_factory(
        tmp_path,
        "def build():\n    size = int(torch.tensor(3).item())\n    return nn.Linear(size, 3), torch.zeros(2, 3)\n",
    )
    resolved = resolve(reference, batch=2)
    assert not next(resolved.model.parameters()).is_meta
    assert "does not build on meta" in resolved.assumptions[0]


def test_a_factory_may_return_a_hugging_face_model_alone(tmp_path: Path) -> None:
    reference = write_factory(
        tmp_path,
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build():\n    return GPT2LMHeadModel(GPT2Config(n_layer=1))\n",
    )
    resolved = resolve(reference, batch=2, sequence=32)
    assert resolved.example_inputs["input_ids"].shape == (2, 32)


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        ("def build(): return 3\n", "the factory returned int", None),
        ("def build(): return nn.Linear(2, 2)\n", "a model and no example inputs", None),
        ("def build(size): return nn.Linear(size, 2)\n", "needs arguments: size", None),
        ("def other(): return 3\n", "has no factory 'build'", None),
        ("build = 3\n", "'build' is not callable", None),
        ("def build():\n    return nn.Linear(2, unknown)\n", "the factory of user_model.py raised NameError", 4),
        ("import nothing_of_this_name\n", "user_model.py raised when imported ModuleNotFoundError", 3),
        ("def build(:\n", "cannot read user_model.py", 3),
    ],
)
def test_a_faulty_factory_names_the_users_line(tmp_path: Path, body: str, message: str, line: int | None) -> None:
    reference = write_factory(tmp_path, body)
    with pytest.raises(ModelError) as caught:
        resolve(reference, batch=1)
    assert message in caught.value.what
    if line is not None:
        assert caught.value.where == f"{tmp_path / 'user_model.py'}:{line}"


def test_a_missing_factory_file_and_a_missing_factory_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        resolve(str(tmp_path / "none.py") + ":build", batch=1)
    with pytest.raises(ModelError, match="names a file and no factory"):
        resolve(str(tmp_path / "none.py"), batch=1)


def test_a_sequence_is_refused_where_the_factory_decides_it(tmp_path: Path) -> None:
    reference = write_factory(tmp_path, "def build():\n    return nn.Linear(4, 4), torch.zeros(2, 4)\n")
    with pytest.raises(ModelError, match="makes its own example inputs"):
        resolve(reference, batch=2, sequence=16)


def test_a_batch_on_a_real_device_has_legal_tokens() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    inputs, _ = example_inputs_for(model, batch=2, sequence=16, device="cpu")
    assert inputs["input_ids"].max() < 11
    assert torch.isfinite(model(**inputs).loss)


def test_a_users_module_keeps_its_inputs_and_its_loss() -> None:
    model, batch = nn.Linear(4, 4), torch.zeros(2, 4)
    resolved = from_module(model, batch, loss_fn=nn.functional.mse_loss)
    assert resolved.model is model and resolved.example_inputs is batch
    assert resolved.loss_fn is nn.functional.mse_loss and resolved.name == "Linear"


def test_a_users_hugging_face_module_needs_no_inputs() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=64))
    assert from_module(model, None).example_inputs["labels"].shape == (2, 64)


def test_a_plain_module_without_inputs_and_a_non_module_are_refused() -> None:
    with pytest.raises(ModelError, match="Linear comes without example inputs"):
        from_module(nn.Linear(2, 2), None)
    with pytest.raises(ModelError, match="not a model: dict"):
        from_module({}, None)

"""Whole tensors under the user's names, whatever the plan: state dicts, checkpoints, and what does not fit."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import Capture, capture
from autoplan.runtime import CheckpointError
from tests.support import models
from tests.support.processes import run_ranks
from tests.support.training import adamw, program_of

PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 8},
    "dp2-zero1": {"data": 2, "micro_batch_size": 4, "zero_stage": 1},
    "dp2-pp2": {"data": 2, "pipeline": 2, "micro_batch_size": 2, "micro_batches": 2},
}


@functools.cache
def gpt() -> tuple[nn.Module, dict[str, Tensor], Capture]:
    model, batch = models.nano_gpt(layers=2)
    return model, batch, capture(model, batch)


def trained(plan: dict[str, Any], save_to: Path | None = None) -> dict[str, Tensor]:
    _, batch, captured = gpt()
    program = program_of(captured, **plan)

    def train(rank: int, world: int) -> dict[str, Tensor]:
        optimizer = adamw(program.parameters())
        program.step(batch)
        optimizer.step()
        if save_to is not None:
            program.save(save_to)
        return program.state_dict()

    states = run_ranks(train, program.plan.gpus)
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])
    return states[0]


def test_a_state_dict_has_the_users_names_and_shapes_tied_aliases_included() -> None:
    model, _, _ = gpt()
    state = trained(PLANS["dp2-pp2"])
    expected = model.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in expected.items()}
    assert torch.equal(state["lm_head.weight"], state["wte.weight"])
    assert not torch.equal(state["wte.weight"], expected["wte.weight"])  # it was trained, in another process
    models.NanoGPT(2).load_state_dict(state)


FIRST = ("dp2-pp2", "dp2-zero1")
OTHERS = [pair for pair in itertools.permutations(PLANS, 2) if pair != FIRST]


@pytest.mark.parametrize(
    ("saved_under", "loaded_under"), [FIRST, *(pytest.param(*pair, marks=pytest.mark.wide) for pair in OTHERS)]
)
def test_a_checkpoint_loads_under_any_other_plan(tmp_path: Path, saved_under: str, loaded_under: str) -> None:
    _, _, captured = gpt()
    saved = trained(PLANS[saved_under], tmp_path / "checkpoint")
    program = program_of(captured, **PLANS[loaded_under])

    def load(rank: int, world: int) -> dict[str, Tensor]:
        program.load(tmp_path / "checkpoint")
        return program.state_dict()

    for state in run_ranks(load, program.plan.gpus):
        assert set(state) == set(saved)
        assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]  # nothing half-written is left


def mlp_program() -> Any:
    model, batch = models.mlp()
    return program_of(capture(model, batch), micro_batch_size=8)


def test_saving_again_replaces_and_an_interrupted_rename_falls_back(tmp_path: Path) -> None:
    program = mlp_program()
    program.save(tmp_path / "checkpoint")
    first = {name: tensor.clone() for name, tensor in program.state_dict().items()}
    with torch.no_grad():
        next(program.parameters()).add_(1.0)
    program.save(tmp_path / "checkpoint")
    program.load(tmp_path / "checkpoint")
    assert not torch.equal(program.state_dict()["layers.0.weight"], first["layers.0.weight"])

    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    program.load(tmp_path / "checkpoint")


def test_a_damaged_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    program = mlp_program()
    program.save(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as a checkpoint"):
        program.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="nothing_here"):
        program.load(tmp_path / "nothing_here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("layers.0.weight"), "lacks tensors of the model: layers.0.weight"),
        (lambda s: s.update({"other": torch.zeros(1)}), "does not have: other"),
        (lambda s: s.update({"layers.0.bias": torch.zeros(3)}), r"`layers.0.bias` is \(3,\) in the state and \(16,\)"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_a_state_of_another_model_is_refused(change: Any, message: str) -> None:
    program = mlp_program()
    state = program.state_dict()
    change(state)
    with pytest.raises(CheckpointError, match=message):
        program.load_state_dict(state)


def test_tied_names_may_be_given_once() -> None:
    _, _, captured = gpt()
    program = program_of(captured, micro_batch_size=8)
    state = program.state_dict()
    del state["lm_head.weight"]
    state["wte.weight"] = torch.ones_like(state["wte.weight"])
    program.load_state_dict(state)
    assert program.state_dict()["lm_head.weight"].eq(1).all()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gpt2", {"tensor": 2, "data": 1, "pipeline": 1}),
        ("llama", {"data": 2, "zero_stage": 3, "tensor": 1, "pipeline": 1}),
    ],
)
def test_a_trained_hugging_face_model_loads_with_from_pretrained(
    tmp_path: Path, family: str, strategy: dict[str, int]
) -> None:
    from transformers import AutoModelForCausalLM

    model, batch = {"gpt2": models.tiny_gpt2, "llama": models.tiny_llama}[family](layers=2)
    program = autoplan.compile(model, gpus=2, device="cpu", example_inputs=batch, strategy=strategy)

    def train(rank: int, world: int) -> dict[str, Tensor]:
        optimizer = adamw(program.parameters())
        program.step(batch)
        optimizer.step()
        program.save(tmp_path / "trained")
        return program.state_dict()

    trained_state = run_ranks(train, 2)[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert type(loaded) is type(model)
    found = loaded.state_dict()
    assert set(found) == set(trained_state)
    assert all(torch.equal(found[name], trained_state[name]) for name in found)
    assert not torch.equal(found["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_several_safetensors_files_with_an_index_load(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    program = mlp_program()
    state = {name: torch.full_like(tensor, 2.0) for name, tensor in program.state_dict().items()}
    first, *rest = state
    files = {"a.safetensors": [first], "b.safetensors": rest}
    for file, names in files.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    program.load(tmp_path)
    assert all(tensor.eq(2.0).all() for tensor in program.state_dict().values())
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        program.load(tmp_path)

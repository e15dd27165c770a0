"""Every model of the zoo, split in every way, computes what one process computes, or says why it is not split."""

from __future__ import annotations

import pytest

from tests.zoo.matrix import AXES, run_entry
from tests.zoo.models import BY_NAME, ZOO
from tests.zoo.table import PAGE, SHOWN, recorded, refused

NAMED = [
    "GPT-2",
    "OPT",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "BERT",
    "RoBERTa",
    "T5",
    "BART",
    "ViT",
    "CLIP",
    "Whisper",
    "Mixtral",
    "Qwen3-MoE",
    "DeepSeek-V3",
    "Mamba",
    "U-Net",
    "diffusers U-Net",
    "diffusers DiT",
    "DiT",
    "nanoGPT",
    "MLP-Mixer",
    "LSTM",
]


def assert_as_recorded(name: str) -> None:
    cells = run_entry(BY_NAME[name])
    differing = {axis: cell.reason for axis, cell in cells.items() if cell.status == "differs"}
    assert not differing
    shown, refusals = recorded()
    assert [SHOWN[cell.status] for cell in cells.values()] == shown[name]
    assert refused(name, cells) == refusals.get(name, [])


@pytest.mark.parametrize("name", ["MLP", "complex numbers", "deep and cross, bags"])
def test_a_small_model_is_equal_however_it_is_split(name: str) -> None:
    assert_as_recorded(name)


@pytest.mark.wide
@pytest.mark.parametrize("name", [entry.name for entry in ZOO])
def test_a_model_is_equal_however_it_is_split(name: str) -> None:
    assert_as_recorded(name)


def test_the_page_has_every_model_and_nine_in_ten_pairs_are_equal() -> None:
    cells, refusals = recorded()
    assert list(cells) == [entry.name for entry in ZOO]
    assert all(len(row) == len(AXES) for row in cells.values())
    shown = [cell for row in cells.values() for cell in row]
    equal, without = shown.count(SHOWN["equal"]), shown.count(SHOWN["refused"])
    assert set(shown) <= {SHOWN["equal"], SHOWN["refused"], SHOWN["n.a."]}
    assert equal >= 0.9 * (equal + without)
    assert set(refusals) == {name for name, row in cells.items() if SHOWN["refused"] in row}


def test_readme_shows_the_pages_table() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text().splitlines()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    first = readme.index(rows[0])
    assert readme[first : first + len(rows)] == rows


def test_the_zoo_is_wide() -> None:
    assert len(ZOO) >= 45 and len(BY_NAME) == len(ZOO)
    assert set(NAMED) <= set(BY_NAME)
    assert sum(entry.kind == "awkward" for entry in ZOO) >= 10
    assert {entry.experts for entry in ZOO} == {0, 4}

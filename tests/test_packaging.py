"""The package as others see it: its data files, its light import, and the two root folders' single name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, metadata, resources

import pytest

import autoplan


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_importing_autoplan_and_its_command_line_loads_no_torch() -> None:
    code = "import sys, autoplan, autoplan.cli.application; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    finished = run_python(code)
    assert finished.stdout.strip() == "[]", finished.stderr


@pytest.mark.parametrize(
    ("package", "folder", "suffix"),
    [("autoplan.models", "presets", ".json"), ("autoplan.cost_models", "hardware", ".toml")],
)
def test_data_files_are_found_through_the_package(package: str, folder: str, suffix: str) -> None:
    names = [entry.name for entry in (resources.files(package) / folder).iterdir()]
    assert any(name.endswith(suffix) for name in names)


@pytest.mark.parametrize("name", ["passes", "cost_models"])
def test_root_folders_have_one_name(name: str) -> None:
    import_module(f"autoplan.{name}")
    with pytest.raises(ImportError, match=f"import autoplan.{name}, not {name}"):
        import_module(name)


def test_the_version_is_the_installed_one() -> None:
    assert autoplan.__version__ == metadata.version("autoplan")


def test_every_public_name_is_there() -> None:
    for name in autoplan.__all__:
        assert getattr(autoplan, name) is not None

"""What a start costs: the help is listed without the commands, and the package's names load on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import autoplan
from autoplan.cli.application import SUMMARIES, command_called


def loaded_by(code: str) -> set[str]:
    """Modules of autoplan's in a fresh process after ``code``."""
    code += "\nprint(*(name for name in sys.modules if name.partition('.')[0] == 'autoplan'))"
    finished = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    """A docstring that changes changes SUMMARIES in autoplan/cli/application.py too."""
    first, _, _ = command_called(name).help.partition("\n\n")
    assert " ".join(first.split()) == SUMMARIES[name]


def test_every_file_of_a_command_is_listed() -> None:
    files = {name.replace("-", "_").replace("import", "import_") for name in SUMMARIES}
    shared = {
        "__init__",
        "__main__",
        "answer",
        "application",
        "completions",
        "console",
        "options",
        "output",
        "plans",
        "streams",
        "summary",
    }
    assert {path.stem for path in (Path(autoplan.__file__).parent / "cli").glob("*.py")} == files | shared


def test_help_loads_no_command_and_nothing_that_plans() -> None:
    code = "from autoplan.cli.application import application\ntry: application(['--help'])\nexcept SystemExit: pass"
    assert loaded_by(code) == {
        *("autoplan", "autoplan.errors"),
        *("autoplan.cli", "autoplan.cli.application", "autoplan.cli.console", "autoplan.cli.streams"),
    }


def test_the_package_loads_its_names_on_first_use() -> None:
    assert loaded_by("import autoplan") == {"autoplan"}
    assert "autoplan.plan" in loaded_by("from autoplan import Plan")


@pytest.mark.parametrize("first", ["autoplan.plan", "autoplan.plan as module", "autoplan.api", "autoplan.cluster"])
def test_plan_is_the_function_whatever_was_imported_first(first: str) -> None:
    loaded_by(f"import {first}\nimport autoplan\nassert autoplan.plan.__name__ == 'plan', autoplan.plan")
    assert isinstance(autoplan.plan, FunctionType)


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        autoplan.plam  # noqa: B018


def test_other_tools_settings_need_no_torch() -> None:
    wanted = "from autoplan.export.read import read_file\nfrom autoplan.export.like import strategy_like"
    code = f"import sys\n{wanted}\nassert 'torch' not in sys.modules"
    loaded_by(code)

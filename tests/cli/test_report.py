"""``autoplan report``: the file is written whole, or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autoplan.plan import Plan
from tests.support.cli import Invoke


def test_the_page_is_written(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    path, target = plan.save(tmp_path / "plan.json"), tmp_path / "plan.html"
    done = invoke("report", str(path), "-o", str(target))
    assert done.exit_code == 0 and done.stdout == "" and "wrote" in done.stderr
    assert target.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.html", "plan.json"]
    assert invoke("report", str(path), "-o", "-").stdout == target.read_text()


def test_what_is_no_plan_writes_nothing(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    done = invoke("report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html"))
    assert done.exit_code == 2 and not (tmp_path / "plan.html").exists()


def test_reading_plans_loads_no_torch(plan: Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    code = (
        "import sys\nfrom autoplan.cli.application import application\n"
        f"page, traced = {str(tmp_path / 'p.html')!r}, {str(tmp_path / 't.json')!r}\n"
        "for words in (['explain'], ['show'], ['show', '--timeline'], ['report', '-o', page],\n"
        "              ['simulate', '-o', traced]):\n"
        f"    try: application([words[0], {str(path)!r}, *words[1:]])\n"
        "    except SystemExit as done: assert done.code == 0, words\n"
        "print('torch' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.stdout.strip().endswith("False"), finished.stderr

"""README shows what the commands print: run them again, and put their output in (or, with --check, compare).

A block fenced as `console` holds commands after `$ `, each followed by its standard output, or by its standard error
where the answer is no (exit code 1). Only commands of autoplan are run, in a folder of their own. The table of accuracy
is that of tests/regression/data/held_out.txt.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)

ACCURACY = re.compile(r"(?<=^<!-- accuracy -->\n)(.*?)(?=^<!-- end -->$)", re.DOTALL | re.MULTILINE)


def accuracy() -> str:
    """Errors by source, as a table."""
    text = (ROOT / "tests" / "regression" / "data" / "held_out.txt").read_text(encoding="utf-8")
    lines = [re.split(r" {2,}", line.strip()) for line in text.split("\n\n", 1)[1].splitlines()]
    assert lines[0] == ["source", "rows", "in the fit", "left out", "bias"], lines[0]
    rows = [" | ".join([*line, ""] if len(line) == 4 else line) for line in lines[1:]]
    head = "| published runs | rows | mean error, in the fit | left out of it | bias |\n|---|---|---|---|---|\n"
    return head + "".join(f"| {row} |\n" for row in rows)


def refreshed(block: str, folder: Path) -> str:
    """The block with each command's output as it is now; files that the commands write go to ``folder``."""
    lines: list[str] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            print(line, file=sys.stderr, flush=True)
            lines += [line, *run(line[2:], folder)]
    return "".join(f"{line}\n" for line in lines)


def run(command: str, folder: Path) -> list[str]:
    words = shlex.split(command)
    if words[0] != "autoplan":
        raise SystemExit(f"README: only autoplan's commands are run, not {command!r}")
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    finished = subprocess.run(
        [sys.executable, "-m", "autoplan.cli", *words[1:]], cwd=folder, capture_output=True, text=True, env=environment
    )
    if finished.returncode not in (0, 1):
        raise SystemExit(f"README: {command!r} failed:\n{finished.stderr}")
    said = finished.stdout if finished.returncode == 0 else finished.stderr
    return said.rstrip("\n").splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where README differs")
    check = parser.parse_args().check
    before = README.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        after = BLOCK.sub(lambda found: refreshed(found[0], Path(folder)), before)
    after = ACCURACY.sub(lambda _: accuracy(), after)
    if not check:
        README.write_text(after, encoding="utf-8")
        return 0
    changes = difflib.unified_diff(before.splitlines(), after.splitlines(), "README.md", "now", lineterm="")
    shown = "\n".join(changes)
    print(shown or "README's outputs are current.")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())

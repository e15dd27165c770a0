"""README shows what the commands print: run them again, and put their output in (or, with --check, compare).

A block fenced as `console` holds commands after `$ `, each followed by its standard output, or by its standard error
where the answer is no (exit code 1). Only commands of autoplan are run, in a folder of their own.
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
    if not check:
        README.write_text(after, encoding="utf-8")
        return 0
    changes = difflib.unified_diff(before.splitlines(), after.splitlines(), "README.md", "now", lineterm="")
    shown = "\n".join(changes)
    print(shown or "README's outputs are current.")
    return 1 if shown else 0


if __name__ == "__main__":
    sys.exit(main())

"""Print the zoo: models x axes, equal, refused with a reason, or not applicable.

    python scripts/zoo.py                 # all of it: a few minutes on two cores
    python scripts/zoo.py Llama "U-Net"   # some models
    python scripts/zoo.py --write         # all of it, into docs/zoo.md
    python scripts/zoo.py --check         # does docs/zoo.md list the zoo's models and axes? Runs nothing.

Exit code 1 where a pair differs, or the page is not of this zoo.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.zoo import table
from tests.zoo.entry import Entry
from tests.zoo.matrix import AXES, Cell, run_entry
from tests.zoo.models import BY_NAME, ZOO

WIDTH = 26


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all of them where none is named")
    parser.add_argument("--write", action="store_true", help="write docs/zoo.md")
    parser.add_argument("--check", action="store_true", help="only look whether docs/zoo.md is of this zoo")
    options = parser.parse_args()
    if options.check:
        return check()
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown or (options.write and options.names):
        parser.error(f"no model {unknown[0]!r}: {', '.join(BY_NAME)}" if unknown else "--write runs all models")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    entries = [BY_NAME[name] for name in options.names] or list(ZOO)
    rows = run(entries)
    if options.write:
        table.PAGE.write_text(table.page(entries, rows))
        print(f"wrote {table.PAGE}")
    return any(cell.status == "differs" for cells in rows.values() for cell in cells.values())


def run(entries: list[Entry]) -> dict[str, dict[str, Cell]]:
    """All cells, printed as they come."""
    print(f"{'':{WIDTH}}" + " ".join(f"{axis.replace('sequence', 'seq'):>13}" for axis in AXES))
    rows: dict[str, dict[str, Cell]] = {}
    started = time.perf_counter()
    for entry in entries:
        cells = rows[entry.name] = run_entry(entry)
        print(f"{entry.name:{WIDTH}}" + " ".join(f"{table.SHOWN[cells[axis].status]:>13}" for axis in AXES), flush=True)
    print()
    for name, cells in rows.items():
        for line in table.refused(name, cells):
            print(line.replace("**", ""))
        for axis, cell in cells.items():
            if cell.status == "differs":
                print(f"- {name}: {axis}: DIFFERS: {cell.reason}")
    worst = max((cell.worst, name, axis) for name, cells in rows.items() for axis, cell in cells.items())
    print(f"\n{table.counts(rows)}\nThe largest error is {worst[0]:.2f} of what is allowed: {worst[1]}, {worst[2]}.")
    print(f"{time.perf_counter() - started:.0f} s")
    return rows


def check() -> int:
    cells, _ = table.recorded()
    if list(cells) == [entry.name for entry in ZOO] and all(len(row) == len(AXES) for row in cells.values()):
        print(f"{table.PAGE.name} has all {len(cells)} models and {len(AXES)} axes")
        return 0
    print(f"{table.PAGE} is not of this zoo: python scripts/zoo.py --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

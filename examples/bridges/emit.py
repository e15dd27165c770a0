"""A plan's program as a folder of Python that needs torch alone, and torchrun on it.

python examples/bridges/emit.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import small

import autoplan


def main() -> None:
    asked = {"pipeline": 2, "tensor": 2, "micro_batch_size": 2}
    program = autoplan.compile(small.model(), gpus=4, device="cpu", example_inputs=small.batch(), strategy=asked)
    with tempfile.TemporaryDirectory() as directory:
        folder = program.emit(Path(directory) / "program")
        for file in sorted(folder.glob("*.py")):
            print(f"{file.name:<15}{len(file.read_text().splitlines()):>5} lines")
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "train.py", "--steps", "3"]
        print(subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()

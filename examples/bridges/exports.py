"""One plan for every tool: written by `autoplan export`, read by the tool's own parser where it is installed.

python examples/bridges/exports.py [TOOL ...]
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import autoplan

ASKED = {
    "torchtitan": {"tensor": 2, "zero_stage": 3},
    "megatron": {"tensor": 2, "pipeline": 2, "schedule": "1f1b"},
    "deepspeed": {"tensor": 1, "pipeline": 1, "zero_stage": 3},
    "accelerate": {"tensor": 1, "pipeline": 1, "zero_stage": 3},
    "fsdp2": {"tensor": 1, "pipeline": 1, "zero_stage": 3},
    "transformers": {"tensor": 8, "pipeline": 1, "zero_stage": 3},
    "slurm": {"tensor": 2, "zero_stage": 3},
    "kubernetes": {"tensor": 2, "zero_stage": 3},
}


def torchtitan(folder: Path) -> object:
    return runpy.run_path(str(folder / "planned.py"))["planned"]().parallelism.tensor_parallel_degree


def megatron(folder: Path) -> object:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    script = (folder / "megatron.sh").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    _, _, layout = script.partition("--pipeline-model-parallel-layout '")
    return PipelineParallelLayerLayout.from_str(layout.partition("'")[0], 2) if layout else "even stages"


def deepspeed(folder: Path) -> object:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    settings = json.loads((folder / "ds_config.json").read_text())
    return f"ZeRO stage {int(DeepSpeedZeroConfig(**settings['zero_optimization']).stage)}"


def accelerate(folder: Path) -> object:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(folder / "accelerate.yaml")).distributed_type


def fsdp2(folder: Path) -> object:
    return runpy.run_path(str(folder / "parallelize.py"))["parallelize"].__doc__


def transformers(folder: Path) -> object:
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(**json.loads((folder / "distributed_config.json").read_text()))
    return f"tp {config.tp_size}, fsdp {config.fsdp_size}"


READERS: dict[str, Callable[[Path], object]] = {
    each.__name__: each for each in (torchtitan, megatron, deepspeed, accelerate, fsdp2, transformers)
}


def main(tools: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for tool in tools or ASKED:
            plan = autoplan.plan("llama3-8b", gpus="2x8xH100", global_batch=64, seq=2048, strategy=ASKED[tool])
            folder = Path(directory) / tool
            plan.save(f"{folder}.json")
            command = [
                sys.executable,
                "-m",
                "autoplan.cli",
                "export",
                f"{folder}.json",
                "--to",
                tool,
                "-o",
                str(folder),
            ]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(f"{tool}: {plan.strategy.describe()}\n{said}", end="")
            if tool in READERS:
                try:
                    print(f"{tool} reads: {READERS[tool](folder)}")
                except ModuleNotFoundError as error:
                    print(f"{tool} is not installed here ({error.name})")


if __name__ == "__main__":
    main(sys.argv[1:])

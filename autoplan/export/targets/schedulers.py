"""Slurm and Kubernetes: how to start the ranks of a plan on a cluster. The degrees go along as a comment or annotation.

Kubernetes: an Indexed Job and a headless service, with no operator to install; pod 0 is the rendezvous.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from autoplan.errors import PlanFileError
from autoplan.export.targets.accelerate import load_yaml
from autoplan.export.targets.settings import Settings
from autoplan.export.targets.types import (
    STRATEGY_KEYS,
    Exported,
    Imported,
    Target,
    header,
    nodes_and_each,
    strategy_text,
)
from autoplan.plan import Plan

_ANNOTATION = "autoplan/strategy"
_SLURM = "the Slurm script"


def slurm(plan: Plan) -> Exported:
    """``train.sbatch``: one task a node, torchrun on each."""
    nodes, each = nodes_and_each(plan)
    comments = "".join(f"# {line}\n" for line in header(plan))
    text = f"""#!/usr/bin/env bash
{comments}# autoplan strategy: {strategy_text(plan)}
#SBATCH --job-name=autoplan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --exclusive

set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \\
    --nnodes "$SLURM_NNODES" \\
    --nproc-per-node {each} \\
    --rdzv-id "$SLURM_JOB_ID" \\
    --rdzv-backend c10d \\
    --rdzv-endpoint "$MASTER_ADDR:29500" \\
    train.py
"""
    return Exported(files={"train.sbatch": text}, launch="sbatch train.sbatch")


def kubernetes(plan: Plan) -> Exported:
    """``job.yaml``: put your image in."""
    nodes, each = nodes_and_each(plan)
    labels = {"app": "autoplan"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "autoplan", "labels": labels},
        "spec": {"clusterIP": "None", "selector": {"job-name": "autoplan"}, "ports": [{"port": 29500}]},
    }
    command = [
        *("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(each), "--rdzv-backend", "c10d"),
        *("--rdzv-id", "autoplan", "--rdzv-endpoint", "autoplan-0.autoplan:29500", "train.py"),
    ]
    container: dict[str, Any] = {
        "name": "train",
        "image": "YOUR_IMAGE",
        "command": command,
        "resources": {"limits": {"nvidia.com/gpu": each}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "autoplan", "labels": labels, "annotations": {_ANNOTATION: strategy_text(plan)}},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "subdomain": "autoplan",
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
                },
            },
        },
    }
    comments = "".join(f"# {line}\n" for line in header(plan))
    text = comments + "---\n".join(yaml.safe_dump(each_, sort_keys=False) for each_ in (service, job))
    return Exported(files={"job.yaml": text}, launch="kubectl apply -f job.yaml")


def read_slurm(text: str) -> Imported:
    """The strategy that the script's comment names. Raises PlanFileError where it names none."""
    nodes, each = (_number(text, rf"#SBATCH --{name}=(\d+)") for name in ("nodes", "gpus-per-node"))
    return _imported(_found(text, r"# autoplan strategy: (\S+)", _SLURM), nodes * each, _SLURM)


def read_kubernetes(text: str) -> Imported:
    """The strategy that the Job's annotation names. Raises PlanFileError where it names none."""
    where = "the Kubernetes manifest"
    documents = [load_yaml(part, where) for part in re.split(r"(?m)^---\s*$", text) if part.strip()]
    job = next((document for document in documents if document.get("kind") == "Job"), None)
    try:
        assert job is not None
        strategy = job["metadata"]["annotations"][_ANNOTATION]
        gpus = (
            job["spec"]["completions"]
            * job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        )
    except (AssertionError, KeyError, IndexError, TypeError):
        raise PlanFileError(
            f"no Job with the annotation {_ANNOTATION}", where=where, attempt="`autoplan export --to kubernetes`"
        ) from None
    return _imported(strategy, gpus, where)


def _imported(text: str, gpus: int, where: str) -> Imported:
    values = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    strategy: dict[str, Any] = {
        key: int(value) if value.isdigit() else value == "true" if value in ("true", "false") else value
        for key, value in values.items()
    }
    settings = Settings(strategy, where)
    for key in (*STRATEGY_KEYS, "recompute"):
        settings.get(key)
    return Imported(strategy=strategy, gpus=gpus, notes=settings.not_priced())


def _found(text: str, pattern: str, where: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise PlanFileError(
            "it names no strategy of a plan", where=where, attempt="a script that `autoplan export --to slurm` wrote"
        )
    return match.group(1)


def _number(text: str, pattern: str) -> int:
    return int(_found(text, pattern, _SLURM))


SLURM = Target(name="slurm", releases=("any",), export=slurm, read=read_slurm)
KUBERNETES = Target(name="kubernetes", releases=("batch/v1",), export=kubernetes, read=read_kubernetes)

"""docs/commands.md: what each command prints, run again from the real command line (or, with --check, compared).

Each line of COMMANDS is run in one folder, in order, with the outputs of those before it, at 80 columns. What depends
on the machine (clocks, versions, measured figures) is compared by its words alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "commands.md"
INPUTS = ("examples/own_model.py", "examples/own_operator.py", "examples/train_gpt.py")
DEEPSPEED = '{"train_batch_size": 512, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}\n'

HEAD = """# What each command prints

Taken from the real commands by `scripts/transcripts.py`; a test runs them again and compares. Every command has
`--help` with an example, and all that print results have `--json` ([answers.schema.json](answers.schema.json); a plan
file is [plan.schema.json](plan.schema.json)). Results go to stdout and messages to stderr, of which those with a result
are left out here; with `--json` an error is on stdout as well, as an object. Exit codes: 0 done, 1 the answer is no, 2
bad input, 3 fault (`run` ends with the script's own code).
On a terminal, what takes longer than a second says how far it is; colour is for terminals alone.
`autoplan --install-completion` teaches your shell to complete commands, options, presets and GPU kinds. The model is
[examples/own_model.py](../examples/own_model.py), that of verify
[examples/own_operator.py](../examples/own_operator.py).
"""
PLAN_FILE = """A plan file is JSON in a fixed order, a range of layers a line, so that `git diff` of two is short; it
holds no clock and no host: equal questions give equal bytes. `schema` says that it is a plan,
`revision` which fields there are: files of older revisions are brought to the newest when they are read
(`show` and `explain` do so, and `Plan.load(path).save(path)` writes it down), one of a newer revision
is refused. Fingerprints of the model's graph and of the cluster's figures are in it: a plan for another
model is refused with what differs. So is a file whose parts disagree: the field is named. Most figures
follow from others, and are compared when a file is read; the last line, `digest`, stands for the rest, so
that a slip of an editor or a merge of two plans is seen where nothing contradicts it. It is no signature,
and no edit by hand is meant to pass: a plan with one figure changed is nobody's. To have another plan,
plan again with `--strategy KEY=VALUE`, which gives the figures that go with it. Files from before
revision 5 have no digest: they are checked by what they hold, and every command that reads one says on
stderr that an edit of the rest would go unnoticed, and in `--json` as `unchecked` (a plan itself has
`first_revision`, which stays when it is saved again). Of layers that are alike the file has one hash, so
that the first layer in which another model differs is named. Where a command takes `PLAN.json`, `-` is
standard input: `ssh login cat plan.json | autoplan explain -`.
"""
VERIFY = """First the whole plan is checked without running anything, for any number of GPUs: the placement of every
value in every rank's graph, the stages against the model's operators, that every message meets its
receiver in an order that can't deadlock, that each parameter is in one place, and memory. Then a
smaller copy runs on this machine's CPU: fewer equal blocks, fewer data ranks, micro-batches and samples
(a Hugging Face model also narrower), but every kind of parallelism that the plan has, the same choices
of the tensor axis, weights that are all random. In float64 it trains three AdamW steps as the plan says
and as one process does, and everything is compared: losses, every gradient, every updated weight and
buffer, the gradient's norm. Allowed is a difference of 1e-10 x (norm of the tensor + learning rate x
square root of its size); what is printed is a share of that. Where something differs, the values inside
are followed to the first operator that does. `autoplan.verify(model, plan)` is the same from Python.
"""
WHAT_IF = """`--what-if` asks for the nearest memory and link speeds at which another plan is best, each a search;
`-o` keeps the answers in the plan file, for `report`.
"""
STATIC = """A model on `meta` has no values to run with, and one of a size that no CPU runs can be checked so all
the same:
"""
WRONG = """The same plan and model, but for a rule that is not true of an operator (`wrong` in
[examples/own_operator.py](../examples/own_operator.py)): exit code 1, and the layer, the operator and
the line.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``quick``: needs no torch. ``measured``: its figures are this machine's. ``code``: its exit code. ``copied``:
    what it prints is for other files and commands, whose lines may be longer than a screen's. ``folded``: it is
    long, and opens on a click. ``about``: what is said before it."""

    line: str
    title: str = ""
    quick: bool = False
    measured: bool = False
    code: int = 0
    copied: bool = False
    folded: bool = False
    about: str = ""


MODEL, OWN = "own_model.py:build", "own_operator.py"
COMMANDS = (
    Command(line="models", title="The models that are known", quick=True),
    Command(line="clusters", title="The GPUs that are known", quick=True),
    Command(line="doctor", title="Whether this machine can plan and train", measured=True),
    Command(line=f"plan {MODEL} --gpus 8xA100-80GB --global-batch 512 -o plan.json", title="A plan"),
    Command(line=f"plan {MODEL} --gpus 8xA100-80GB --global-batch 512 --strategy pipeline=4 -o pipeline.json"),
    Command(line=f"plan {MODEL} --gpus 1xL4", code=1),
    Command(
        line="show pipeline.json --timeline", title="A plan file, its step as a timeline", quick=True, about=PLAN_FILE
    ),
    Command(line="explain pipeline.json", title="Why, and why not less or more", quick=True),
    Command(line=f"explain plan.json --operators --model {MODEL}"),
    Command(line=f"explain plan.json --layer blocks.7 --model {MODEL}"),
    Command(line=f"explain plan.json --what-if --model {MODEL}", about=WHAT_IF),
    Command(line="diff plan.json pipeline.json", title="What changed, and what it costs", quick=True),
    Command(line=f"fit {MODEL} --gpus 4xH100", title="Whether it fits"),
    Command(line=f"min-gpus {MODEL} --gpu A10G", title="On how few GPUs"),
    Command(line=f"compare {MODEL} --gpus 8xA100-80GB --global-batch 512", title="The best of each family"),
    Command(
        line=f"predict {MODEL} --gpus 8xA100-80GB --global-batch 512 --strategy data=8,zero_stage=3",
        title="A strategy of your own",
    ),
    Command(line="simulate pipeline.json -o trace.json", title="A trace for Perfetto", quick=True),
    Command(line="report pipeline.json -o plan.html", title="A page to share", quick=True),
    Command(
        line="export pipeline.json --to megatron", title="Settings of other tools, and back", quick=True, copied=True
    ),
    Command(line="import ds_config.json", quick=True, copied=True),
    Command(line=f"emit {MODEL} pipeline.json -o program", title="The program as Python"),
    Command(
        line=f"plan {OWN}:build --gpus 2xA100 --strategy tensor=2 -o own.json", title="Whether it computes the same"
    ),
    Command(line=f"verify {OWN}:build own.json", measured=True, about=VERIFY),
    Command(line=f"verify {OWN}:wrong own.json", measured=True, code=1, about=WRONG),
    Command(line=f"verify {OWN}:build own.json --json", measured=True, folded=True),
    Command(line=f"verify {MODEL} pipeline.json --static", measured=True, about=STATIC),
    Command(line="run train_gpt.py --gpus 2 --device cpu -- --steps 3", title="Training", measured=True),
    Command(
        line="calibrate --device cpu --gpus 2 --quick -o here.toml", title="This machine's own figures", measured=True
    ),
)


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    for name in INPUTS:
        shutil.copy(ROOT / name, folder)
    (folder / "ds_config.json").write_text(DEEPSPEED, encoding="utf-8")


def run(command: Command, folder: Path) -> str:
    """What it prints: results, and then messages, as a terminal shows both."""
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    finished = subprocess.run(
        [sys.executable, "-m", "autoplan.cli", *shlex.split(command.line)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    if finished.returncode != command.code:
        raise SystemExit(f"{command.line}: exit code {finished.returncode}\n{finished.stderr}")
    said = finished.stdout + (finished.stderr if not finished.stdout or command.code else "")
    said = said.replace(f"{folder.resolve()}/", "")
    return "".join(f"{line.rstrip()}\n" for line in said.splitlines())


def words(text: str) -> list[str]:
    """What holds of any machine: the words without figures, up to a table of what was measured worst."""
    kept = text.split("predicted worst")[0]
    return re.findall(r"[A-Za-z]{4,}", re.sub(r"(?m)^(ok|warn|Took).*\n(?: +.*\n)*", "", kept))


def written(text: str, line: str) -> str | None:
    """The transcript of a command in the document's text."""
    start = text.find(f"```console\n$ autoplan {line}\n")
    if start < 0:
        return None
    start = text.index("\n", start + len("```console\n")) + 1
    return text[start : text.index("```", start)]


def document(said: dict[str, str]) -> str:
    """The page."""
    parts = [HEAD]
    for command in COMMANDS:
        if command.title:
            parts.append(f"\n## {command.title}\n")
        parts.append(f"\n{command.about}" if command.about else "")
        block = f"\n```console\n$ autoplan {command.line}\n{said[command.line]}```\n"
        summary = f"<summary><code>autoplan {command.line}</code></summary>"
        parts.append(f"\n<details>{summary}\n{block}\n</details>\n" if command.folded else block)
    return "".join(parts)


def differences(before: str, folder: Path, commands: tuple[Command, ...]) -> list[str]:
    """The commands whose transcript in the text is not what they print."""
    stale = []
    for command in commands:
        old, new = written(before, command.line), run(command, folder)
        same = old is not None and (words(old) == words(new) if command.measured else old == new)
        if not same:
            stale.append(f"autoplan {command.line}\n--- {DOCUMENT.name}\n{old}\n--- now\n{new}")
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the document differs")
    check = parser.parse_args().check
    before = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.is_file() else ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if check:
            stale = differences(before, folder, COMMANDS)
            print("\n\n".join(stale) or f"{DOCUMENT.name} is current.")
            return 1 if stale else 0
        said = {}
        for command in COMMANDS:
            print(f"autoplan {command.line}", file=sys.stderr, flush=True)
            old, new = written(before, command.line), run(command, folder)
            keep = old is not None and command.measured and words(old) == words(new)
            said[command.line] = old if keep and old is not None else new
        DOCUMENT.write_text(document(said), encoding="utf-8")
        for plan in ("plan.json", "pipeline.json"):
            shutil.copy(folder / plan, DOCUMENT.parent / plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The modules of a folder beside model.py, cut from those in ``emitted/`` to what a plan has use for.

A line that ends in ``# if MARK`` is kept where all of its marks hold; what nothing of the folder reads is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoplan.export.extract import extract, reads, with_class

_SOURCES = Path(__file__).with_name("emitted")
_GRADIENTS = {0: "replicated.py", 1: "sharded.py", 2: "sharded.py", 3: "gathered.py"}
_PACKED_ARGUMENTS = ", parts: Sequence[int] = (), block: int = 0"  # of collectives
# What model.py may import of parallel.py.
FROM_PARALLEL = ("DEVICE", "Input", "Parameters", "Spec", "Split", "Stage", "Value", "recomputed")
_MARK = re.compile(r"  # if ([A-Z]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a program has. ``chain``: its stages stand in a row; ``packed``: dimensions of several runs are split;
    ``summed``: tensor ranks find summands of gradients; ``weighed``: the loss divides by what it counts;
    ``alone``: one rank may be started without torchrun."""

    zero_stage: int
    context: bool
    expert: bool
    masters: bool
    chain: bool
    packed: bool
    tied: bool
    aliases: bool
    random: bool
    weighed: bool
    summed: bool
    compiled: bool
    alone: bool

    @property
    def absent(self) -> frozenset[str]:
        """The marks that do not hold."""
        either = {
            "LAST": self.zero_stage != 2,
            "EVERY": self.zero_stage == 2,
            "CONTEXT": self.context,
            "NOCONTEXT": not self.context,
            "EXPERT": self.expert,
            "DENSE": not self.expert,
            "INSIDE": self.context or self.expert,
            "MASTERS": self.masters,
            "PLAIN": not self.masters,
            "CHAIN": self.chain,
            "BRANCHES": not self.chain,
            "PACKED": self.packed,
            "WHOLE": not self.packed,
            "TIED": self.tied,
            "ALIASES": self.aliases,
            "RANDOM": self.random,
            "WEIGHED": self.weighed,
            "SUMMED": self.summed,
            "COMPILED": self.compiled,
            "ALONE": self.alone,
            "EAGER": not self.compiled,
        }
        return frozenset(mark for mark, holds in either.items() if not holds)


def runtime_files(called: Mapping[str, Sequence[str]], features: Features) -> dict[str, str]:
    """Text by file name. ``called``: the functions that model.py imports of each module."""
    absent = features.absent
    files = {name: without(_template(name), absent) for name in ("program.py", "train.py")}
    gradients = without(_template(_GRADIENTS[features.zero_stage]), absent)
    files["gradients.py"] = extract(gradients, ("Gradients", "gathers"))
    # A module reads what stands behind it alone.
    for module in ("positions", "experts", "collectives"):
        wanted = {*called.get(module, ()), *_imported(module, files.values())}
        if wanted:
            text = without(_template(f"{module}.py"), absent)
            if module == "collectives" and not features.packed:
                text = text.replace(_PACKED_ARGUMENTS, "")
            files[f"{module}.py"] = extract(text, wanted)
    parallel = without(_template("parallel.py"), absent)
    if features.chain:
        for name in ("Value", "Pipeline"):
            parallel = with_class(parallel, name, _template("chain.py"))
    files["parallel.py"] = extract(parallel, {*FROM_PARALLEL}.union(*map(reads, files.values())))
    return files


def _imported(module: str, texts: Collection[str]) -> set[str]:
    """The names that ``texts`` import of ``module``."""
    return {name for text in texts for name in reads(text) if f"from {module} import" in text}


def _template(name: str) -> str:
    return (_SOURCES / name).read_text(encoding="utf-8")


def without(text: str, absent: Collection[str]) -> str:
    """``text`` without the lines that end in a mark of ``absent``, and without the other marks."""
    lines: list[str] = []
    gap = False  # lines are left out here
    for line in text.splitlines():
        marks = set()
        while found := _MARK.search(line):
            marks.add(found.group(1))
            line = line[: found.start()]
        if not marks.isdisjoint(absent):
            gap = True
        elif line or not gap or lines[-1]:  # one empty line where a method was
            lines.append(line)
            gap = gap and not line
    return "\n".join(lines) + "\n"

"""emit: a plan's program as a folder of Python that needs torch and nothing else.

=================  ==================================================================================
``model.py``       the plan's degrees, one function a distinct block, the stages, tables of parameters
``collectives.py`` what blocks call where the tensor axis splits them
``positions.py``   what blocks call where the context axis splits sequences
``experts.py``     what blocks call where the expert axis spreads experts, or torch has no product of groups
``parallel.py``    mesh, pipeline, checkpoints
``gradients.py``   the data axis
``program.py``     a training step
``train.py``       ``torchrun train.py``
``buffers.pt``     the model's buffers and constants
``weights/``       the model's weights, where it has any
=================  ==================================================================================
"""

from __future__ import annotations

import operator
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Node

from autoplan.capture import Capture, InputSpec
from autoplan.errors import AutoplanError, StrategyError
from autoplan.export.blocks import Function, Functions, Group, groups
from autoplan.export.expressions import of_folder
from autoplan.export.stages import StageText, stage_text
from autoplan.export.tables import Entry, chain_source, specs_source, stages_source, values_source
from autoplan.export.templates import FROM_PARALLEL, Features, runtime_files
from autoplan.export.texts import (
    INTERLEAVED,
    NEVER_SPLIT,
    ONE_STAGE,
    batch_function_text,
    distinct_stages,
    function_text,
)
from autoplan.layers import LayerGraph
from autoplan.layers.order import in_order_of
from autoplan.passes.graph_facts import GraphFacts
from autoplan.passes.split_stages import StageGraph, Value
from autoplan.plan import Plan
from autoplan.runtime.build import Builder, RankGraphs, is_gathered, layer_policies
from autoplan.runtime.masters import keeps_masters
from autoplan.sharding.placements import Copied, Shard

_SLICES = ("gather_from_axis", "scatter_to_axis", "gather_for_axis", "scatter_sum_to_axis", "slice_for_axis")
_WARM_UPS = {
    "gpipe": "MICRO_BATCHES",  # all forwards first
    "1f1b": "min(MICRO_BATCHES, PIPELINE - rank)",
    # Its list splits backwards in two; whole ones in 1F1B's order compute the same, and wait a little longer.
    "zero_bubble": "min(MICRO_BATCHES, PIPELINE - rank)",
    "interleaved": "min(MICRO_BATCHES, PIPELINE - rank)",  # of one chunk
}


def emit(capture: Capture, plan: Plan, layers: LayerGraph, builder: Builder, directory: str | os.PathLike[str]) -> Path:
    """Write the program of ``plan`` to ``directory``, beside and renamed; returns it.

    A zero-bubble plan is emitted in 1F1B's order. Raises AutoplanError where ``directory`` exists already,
    StrategyError for buffers without values and for operators that are none of torch's.
    """
    target = check_target(directory)
    written = Emission(capture, plan, in_order_of(layers, plan.model.layers), builder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}."))
    except OSError as error:
        raise AutoplanError(f"cannot write the program: {error.strerror}", where=str(target)) from None
    try:
        written.write(beside)
        os.chmod(beside, 0o755)
        if target.exists():
            target.rmdir()
        os.replace(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return target


def check_target(directory: str | os.PathLike[str]) -> Path:
    """``directory``, where it is free; raises as :func:`emit`."""
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise AutoplanError(
            "there is something there already, and nothing is overwritten",
            where=str(target),
            legal="a path that does not exist, or an empty folder",
            attempt=f"another name, or remove {target} first",
        )
    return target


class Emission:
    """The texts of one program."""

    def __init__(self, capture: Capture, plan: Plan, layers: LayerGraph, builder: Builder) -> None:
        self._capture, self._plan, self._layers, self._builder = capture, plan, layers, builder
        self._functions = Functions()
        cut = builder.cut(0)
        self._graphs: RankGraphs = cut.graphs
        self._origin: Mapping[str, str] = cut.origin
        self._ownership = builder.ownership()

    def write(self, directory: Path) -> None:
        files = {"model.py": self.model()} | runtime_files(self._called, self._features())
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
        self._save_tensors(directory)

    def _features(self) -> Features:
        strategy = self._plan.strategy
        return Features(
            zero_stage=strategy.zero_stage if strategy.data > 1 else 0,
            context=strategy.context > 1,
            expert=strategy.expert > 1,
            masters=keeps_masters(self._plan.precision),
            chain=self._is_chain,
            packed=self._is_packed(),
            tied=bool(self._ownership.tied),
            aliases=bool(self._aliases),
            random=self._random(),
            weighed=self._graphs.weights is not None,
            summed=any(isinstance(placement, Copied) for placement in self._graphs.placements.values()),
            compiled=self._plan.compiled,
            alone=strategy.gpus == 1,
        )

    def _is_packed(self) -> bool:
        """Whether a dimension that consists of several runs is split over the tensor axis."""
        texts = [
            node.args[3:] or node.kwargs for node in self._nodes if getattr(node.target, "__name__", "") in _SLICES
        ]
        split = [p for p in self._graphs.placements.values() if isinstance(p, Shard)]
        return any(map(bool, texts)) or any(p.parts or p.block for p in split)

    @cached_property
    def _is_chain(self) -> bool:
        """Whether each stage sends one value to the next, which gives its gradient back."""
        ends = [(value.source, value.destinations) for value in self._values]
        alike = all(value.differentiable and value.order == tuple(range(len(value.order))) for value in self._values)
        return alike and ends == [(s, (s + 1,)) for s in range(len(self._graphs.stages) - 1)]

    # ---------------------------------------------------------------------------------------------------- model.py

    def model(self) -> str:
        """The text of model.py."""
        policies = dict(enumerate(layer_policies(self._plan)))
        texts = [self._stage(stage, policies) for stage in self._graphs.stages]
        stages = distinct_stages(texts)
        weights = self._loss_weights()
        parts = [
            *(function_text(function, self._gathers(function)) for function in self._functions.by_key.values()),
            *weights,
            *(stage.source for stage in stages.values()),
            self._tables(texts),
            self._schedule(),
            stages_source([(stages[text.body].name, text.ranges) for text in texts]),
        ]
        text = "\n\n\n".join(parts)
        return f"{self._header(text)}\n\n\n{text}\n"

    def _stage(self, stage: StageGraph, policies: Mapping[int, str]) -> StageText:
        planned = self._plan.stages[stage.index]
        held = range(planned.first_layer, planned.last_layer + 1)
        calls = []
        for group in groups(stage.graph_module, self._layer_of, held, self._label):
            if group.layer is not None and policies[group.layer] == "selective":
                group = self._with_core(group)
            calls.append(self._functions.call(group, stage.graph_module))
        return stage_text(stage, calls, policies, [value.name for value in self._values])

    @cached_property
    def _values(self) -> tuple[Value, ...]:
        return tuple(value for stage in self._graphs.stages for value in stage.sends)

    @cached_property
    def _layer_of(self) -> dict[str, int]:
        layer_of = {name: index for index, layer in enumerate(self._layers.layers) for name in layer.nodes}
        return layer_of | {new: layer_of[old] for new, old in self._origin.items() if old in layer_of}

    @cached_property
    def _classes(self) -> dict[str, str]:
        """The class of every module that the trace went through, by its path."""
        found: dict[str, str] = {}
        for node in self._capture.graph_module.graph.nodes:
            for path, module in (node.meta.get("nn_module_stack") or {}).values():
                found.setdefault(path, module if isinstance(module, str) else module.__qualname__)
        return found

    def _label(self, layer: int) -> tuple[str, str]:
        """What a layer is called: its module's class, if it is one of many, else its own name; and the prefix of its
        parameters."""
        entry = self._layers.layers[layer]
        prefix = f"{entry.name}."
        name = entry.name.rpartition(".")[2]
        label = self._classes.get(entry.name, name).rpartition(".")[2] if name.isdigit() else name
        return label, prefix if any(each.startswith(prefix) for each in entry.parameters) else ""

    def _with_core(self, group: Group) -> Group:
        assert group.layer is not None
        layer = self._layers.layers[group.layer]
        operators = self._layers.kinds[layer.kind].operators
        names = {name for name, operator in zip(layer.nodes, operators, strict=True) if operator.core}
        names |= {new for new, old in self._origin.items() if old in names}
        return replace(group, core=frozenset(node for node in group.nodes if node.name in names))

    def _gathers(self, function: Function) -> tuple[str, ...]:
        """The parameters that are made whole around a function, under ZeRO-3."""
        if not is_gathered(self._plan.strategy):
            return ()
        call = self._functions.first_call[function.name]
        names = [name for name in call.reads if name in self._ownership.canonical]
        return tuple(n[len(call.prefix) :] if call.prefix and n.startswith(call.prefix) else f"/{n}" for n in names)

    def _loss_weights(self) -> list[str]:
        module = self._graphs.weights
        if module is None:
            return [NEVER_SPLIT]
        nodes = tuple(node for node in module.graph.nodes if node.op == "call_function")
        call = self._functions.call(Group(layer=None, label="loss weights", prefix="", nodes=nodes), module)
        self._functions.drop(call.function)
        return [batch_function_text(call.function, [node.name for node in call.inputs])]

    # ------------------------------------------------------------------------------------------------------- tables

    def _header(self, text: str) -> str:
        """Docstring, the imports that ``text`` needs, and the plan's degrees."""
        strategy = self._plan.strategy
        before = [module for module in self._called if module < "gradients"]  # imports stand in the alphabet's order
        after = [module for module in self._called if module > "parallel"]
        words = set(re.findall(r"\w+", text))

        def used(module: str, names: Sequence[str]) -> list[str]:
            found = [name for name in names if name in words]
            return _import(module, found) if found else []

        lines = [
            f'"""{self._plan.model.name}: {strategy.describe()}.',
            "",
            "Blocks are functions of `p`, their parameters by name; comments are the model's own lines.",
            '"""',
            "",
            *(["import itertools"] if "itertools" in words else []),
            *used("collections.abc", ("Iterator", "Mapping", "Sequence")),
            *used("itertools", ("chain",)),
            "",
            "import torch",
            *(["import torch.nn.functional as F"] if "F" in words else []),
            "from torch import Tensor",
            "",
            *[line for module in before for line in used(module, self._called[module])],
            *used("gradients", ("gathers",)),
            *used("parallel", FROM_PARALLEL),
            *[line for module in after for line in used(module, self._called[module])],
            "",
            *self._degrees(),
            f"MICRO_BATCH_SIZE, MICRO_BATCHES = {strategy.micro_batch_size}, {strategy.micro_batches}",
            "GLOBAL_BATCH = DATA * MICRO_BATCH_SIZE * MICRO_BATCHES",
        ]
        return "\n".join(lines)

    def _degrees(self) -> list[str]:
        """The axes as constants, those inside the data axis only where the plan has them."""
        strategy = self._plan.strategy
        lines = [f"PIPELINE, DATA, TENSOR = {strategy.pipeline}, {strategy.data}, {strategy.tensor}"]
        if strategy.context > 1:
            lines.append(f"CONTEXT = {strategy.context}  # ranks in place of each of DATA, with its rows")
        if strategy.expert > 1:
            lines.append(f"EXPERT = {strategy.expert}  # neighbours on the data axis, with a run of experts each")
        return lines

    @cached_property
    def _nodes(self) -> list[Node]:
        return [node for stage in self._graphs.stages for node in stage.graph_module.graph.nodes]

    @cached_property
    def _called(self) -> dict[str, list[str]]:
        """The functions of the folder that the graphs call, by the module that has them."""
        found: dict[str, set[str]] = {}
        for node in self._nodes:
            if node.op == "call_function" and (own := of_folder(node)) is not None:
                found.setdefault(own.module, set()).add(own.name)
        return {module: sorted(names) for module, names in sorted(found.items())}

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {name: first for name, first in self._ownership.canonical.items() if name != first}

    def _random(self) -> bool:
        """Whether the model draws random numbers (dropout)."""
        facts = [GraphFacts(stage.graph_module.graph, stage.graph_module) for stage in self._graphs.stages]
        return any(each.is_random(node) for each in facts for node in each.order)

    def _tables(self, texts: Sequence[StageText]) -> str:
        entries = [*self._parameter_entries(), *self._buffer_entries()]
        tied = tuple(self._ownership.tied.items())
        totals = [node for node in self._nodes if node.op == "placeholder" and node.name.startswith("loss_total_")]
        dtypes = {node.name: node.meta["val"].dtype for node in totals}
        lines = [
            "INPUTS = {  # of a batch",
            *(f'    "{spec.placeholder}": {_input(spec, self._capture)},' for spec in self._capture.inputs),
            "}",
            f"LOSS_TOTALS = ({''.join(f'{dtypes[name]}, ' for name in sorted(dtypes)).rstrip()})",
            *(chain_source(self._values) if self._is_chain else values_source(self._values)),
        ]
        if self._aliases:
            lines.append(f"ALIASES = {_mapping(self._aliases)}  # tied parameters by the name that they are kept under")
        if tied:
            lines.append(f"TIED = {_pairs(tied)}  # held by several stages")
        return "\n".join(lines) + "\n\n\n" + specs_source(entries, [text.ranges for text in texts])

    def _schedule(self) -> str:
        """``actions(rank)``: an alternation for one stage a rank, the whole order where a rank holds several."""
        strategy = self._plan.strategy
        if strategy.virtual_stages > 1:
            return INTERLEAVED.replace("CHUNKS", str(strategy.virtual_stages))
        return ONE_STAGE.replace("WARM_UP", _WARM_UPS[strategy.schedule])

    def _parameter_entries(self) -> Iterator[Entry]:
        for name, parameter in self._capture.graph_module.named_parameters():
            placement = self._graphs.placements.get(name)
            text = f"{tuple(parameter.shape)}, {parameter.dtype}"
            if name in self._graphs.experts:
                text += ", Split(0), spread=True"
            elif isinstance(placement, Shard):
                text += f", {_split(placement)}"
            if isinstance(placement, Copied):
                text += ", summed=True"
            if not parameter.requires_grad:
                text += ", trainable=False"
            yield Entry(name=name, text=text, stages=self._holders.get(name, (0,)))  # an unused one rides along

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter, by the first of its tied group's names."""
        found: dict[str, dict[int, None]] = {}
        for stage in self._graphs.stages:
            for name in stage.parameters:
                found.setdefault(self._ownership.canonical[name], {})[stage.index] = None
        return {name: tuple(stages) for name, stages in found.items()}

    def _buffer_entries(self) -> Iterator[Entry]:
        for name, value in self._buffers().items():
            held = tuple(stage.index for stage in self._graphs.stages if name in stage.buffers)
            yield Entry(name=name, text=f"{tuple(value.shape)}, {value.dtype}, is_parameter=False", stages=held)

    def _buffers(self) -> dict[str, Tensor]:
        names = dict.fromkeys(name for stage in self._graphs.stages for name in stage.buffers)
        module = self._capture.graph_module
        return {name: _attribute(module, name) for name in names}

    def _save_tensors(self, directory: Path) -> None:
        buffers = {name: value.detach().cpu().clone() for name, value in self._buffers().items()}
        missing = [name for name, value in buffers.items() if value.is_meta]
        if missing:
            raise StrategyError(
                f"buffer `{missing[0]}` is on meta and has no values to emit",
                where="model",
                attempt="emit from a model whose buffers are real, or give its factory or config.json",
            )
        if buffers:
            torch.save(buffers, directory / "buffers.pt")
        weights = dict(self._capture.graph_module.named_parameters())
        if weights and not any(weight.is_meta for weight in weights.values()):
            (directory / "weights").mkdir()
            torch.save(
                {name: w.detach().cpu().clone() for name, w in weights.items()} | buffers, directory / "weights/all.pt"
            )


def _import(module: str, names: Sequence[str]) -> list[str]:
    line = f"from {module} import {', '.join(names)}"
    return [line] if len(line) <= 120 else [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def _input(spec: InputSpec, capture: Capture) -> str:
    below = "" if spec.dtype.is_floating_point else f", below={_vocabulary(spec, capture)}"
    return f"Input({tuple(spec.shape)}, {spec.dtype}, batched={spec.batched}{below})"


def _vocabulary(spec: InputSpec, capture: Capture) -> int:
    """A bound for made-up integers: the rows of the smallest table that they may index."""
    tables = [node for node in capture.graph_module.graph.nodes if node.target is torch.ops.aten.embedding.default]
    rows = [int(node.args[0].meta["val"].shape[0]) for node in tables if _comes_from(node.args[1], spec.placeholder)]
    every = [int(node.args[0].meta["val"].shape[0]) for node in tables]
    return min(rows or every[:1] or [2])


def _comes_from(node: Node, name: str) -> bool:
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.name == name


def _split(placement: Shard) -> str:
    extra = f", parts={placement.parts}" if placement.parts else ""
    extra += f", block={placement.block}" if placement.block else ""
    return f"Split({placement.dim}{extra})"


def _mapping(items: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": "{value}"' for key, value in items.items()) + "}"


def _pairs(items: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return "(" + "".join(f'("{name}", {stages}), ' for name, stages in items).rstrip() + ")"


def _attribute(module: nn.Module, name: str) -> Tensor:
    value = operator.attrgetter(name)(module)
    assert isinstance(value, Tensor)
    return value

"""A kind of layer as one rank runs it: operators, parameters and collectives divided by what was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch.fx import Node

from autoplan.layers.types import Attention, Collective, Gemm, LayerKind, Operator, Parameter
from autoplan.sharding.conversions import Step, steps
from autoplan.sharding.layer_view import LayerView
from autoplan.sharding.placements import Copied, Placement, Shard
from autoplan.sharding.rules import Option

Chosen = Mapping[Node, Option]


def conversions(view: LayerView, chosen: Chosen, stored: Mapping[Node, Placement]) -> list[tuple[Node, Step, Node]]:
    """Every conversion of the layer once: (value, step, the reader it is made for), in the order of need."""
    found: dict[tuple[Node, Step], Node] = {}
    wanted: list[tuple[Node, Placement, Node]] = []
    for node in view.nodes:
        for operand, state in zip(view.facts.operation(node).operands, chosen[node].inputs, strict=True):
            wanted.append((operand.node, state, node))
        if node in view.exported:
            wanted.append((node, view.handed(node), node))
    for value, target, reader in wanted:
        source = chosen[value].output if value in chosen else stored.get(value, view.handed(value))
        for step in steps(source, target, differentiable=view.facts.differentiable[value]) or ():
            found.setdefault((value, step), reader)
    return [(value, step, reader) for (value, step), reader in found.items()]


def local_kind(
    view: LayerView, kind: LayerKind, chosen: Chosen, stored: Mapping[Node, Placement], by_role: Sequence[Placement]
) -> LayerKind:
    """``kind`` on one rank; ``by_role``: the placement of each of its parameters."""
    converted = conversions(view, chosen, stored)
    gathered = {value for value, step, _ in converted if isinstance(step.source, Shard)}
    operators = tuple(
        local_operator(view, node, operator, chosen[node], whole=node in gathered)
        for node, operator in zip(view.nodes, kind.operators, strict=True)
    )
    parameters = tuple(
        _local_parameter(parameter, placement, view.facts.degree)
        for parameter, placement in zip(kind.parameters, by_role, strict=True)
    )
    collectives = [*_internal(view, chosen)]
    for value, step, reader in converted:
        size, batched = view.bytes_of(value)
        for name, phase in ((step.forward, "forward"), (step.backward, "backward")):
            if name is not None:
                collectives.append(
                    Collective(name=name, phase=phase, bytes_per_sample=size, batched=batched, operator=reader.name)  # type: ignore[arg-type]
                )
    return dataclasses.replace(
        kind,
        operators=_with_gathered(view, operators, converted),
        parameters=parameters,
        collectives=tuple(collectives),
        input_bytes=kind.input_bytes * _handed_share(view),
    )


def _with_gathered(
    view: LayerView, operators: tuple[Operator, ...], converted: Sequence[tuple[Node, Step, Node]]
) -> tuple[Operator, ...]:
    """``operators``; one that gathers a share for its product keeps the whole of it. (Where the share's maker is said
    to keep it, that is the whole already: see ``whole`` of :func:`local_operator`.)"""
    position = {node: index for index, node in enumerate(view.nodes)}
    found = list(operators)
    for value, step, reader in converted:
        at = position[reader]
        kept_by_maker = value in position and found[position[value]].saved_bytes > 0
        if isinstance(step.source, Shard) and found[at].gemm is not None and not kept_by_maker:
            kept = found[at].saved_bytes + view.bytes_of(value)[0]
            found[at] = dataclasses.replace(found[at], saved_bytes=kept)
    return tuple(found)


def _handed_share(view: LayerView) -> float:
    """The part of what enters the layer that one rank is handed."""
    inside = set(view.nodes)
    entering = {
        value: view.bytes_of(value)[0]
        for node in view.nodes
        for value in node.all_input_nodes
        if value not in inside and value.op != "get_attr" and view.facts.differentiable[value]
    }
    local = sum(size / (view.facts.degree if value in view.shares else 1) for value, size in entering.items())
    return local / sum(entering.values()) if local else 1.0


def local_operator(view: LayerView, node: Node, operator: Operator, option: Option, *, whole: bool) -> Operator:
    """``operator`` with its work divided where ``option`` splits it; ``whole``: a gathered copy is what is kept."""
    degree = view.facts.degree
    if not option.split:
        return operator
    operands = view.facts.operation(node).operands
    is_parameter = [view.facts.parameter(operand.node) is not None for operand in operands]
    return dataclasses.replace(
        operator,
        flops=operator.flops / degree,
        backward_flops=operator.backward_flops / degree,
        read_bytes=operator.read_bytes * _share(view, node, option, [not is_ for is_ in is_parameter]),
        parameter_bytes=operator.parameter_bytes * _share(view, node, option, is_parameter),
        written_bytes=operator.written_bytes / (degree if isinstance(option.output, Shard) else 1),
        saved_bytes=operator.saved_bytes / (degree if option.keeps_share and not whole else 1),
        gemm=_local_gemm(operator.gemm, option.gemm, degree),
        attention=_local_attention(operator.attention, option, view, node),
    )


def _share(view: LayerView, node: Node, option: Option, wanted: Sequence[bool]) -> float:
    """The part of the wanted operands' bytes that one rank reads."""
    whole = local = 0.0
    for operand, state, counts in zip(view.facts.operation(node).operands, option.inputs, wanted, strict=True):
        size = view.bytes_of(operand.node)[0] if counts else 0.0
        whole += size
        local += size / (view.facts.degree if isinstance(state, Shard) else 1)
    return local / whole if whole else 1.0


def _local_gemm(gemm: Gemm | None, divided: str, degree: int) -> Gemm | None:
    if gemm is None or divided not in ("m", "n", "k", "groups"):
        return gemm
    return dataclasses.replace(gemm, **{divided: max(1, getattr(gemm, divided) // degree)})


def _local_attention(attention: Attention | None, option: Option, view: LayerView, node: Node) -> Attention | None:
    if attention is None or not isinstance(option.output, Shard):
        return attention
    degree = view.facts.degree
    return dataclasses.replace(
        attention,
        heads=max(1, attention.heads // degree),
        key_value_heads=max(1, attention.key_value_heads // degree),
    )


def _local_parameter(parameter: Parameter, placement: Placement, degree: int) -> Parameter:
    if isinstance(placement, Copied):
        return dataclasses.replace(parameter, summed=True)
    if not isinstance(placement, Shard):
        return parameter
    return dataclasses.replace(parameter, elements=parameter.elements // degree)


def _internal(view: LayerView, chosen: Chosen) -> list[Collective]:
    """Collectives inside an operator's own form."""
    found: list[Collective] = []
    for node in view.nodes:
        form = chosen[node].form
        if form == "add_after_reduce":
            size, batched = view.bytes_of(node)
            found.append(
                Collective(
                    name="all_reduce", phase="forward", bytes_per_sample=size, batched=batched, operator=node.name
                )
            )
        elif form == "add_after_scatter":
            size, batched = view.bytes_of(node)
            for name, phase in (("reduce_scatter", "forward"), ("all_gather", "backward")):
                found.append(
                    Collective(name=name, phase=phase, bytes_per_sample=size, batched=batched, operator=node.name)  # type: ignore[arg-type]
                )
        elif form == "vocabulary_cross_entropy":
            logits = view.facts.operation(node).operands[0]
            size, batched = view.bytes_of(logits.node)
            classes = logits.shape[min(1, len(logits.shape) - 1)]
            for numbers in (1, 2):  # a row's maximum; then its sum of exponentials and target logit
                found.append(
                    Collective(
                        name="all_reduce",
                        phase="forward",
                        bytes_per_sample=size / classes * numbers,
                        batched=batched,
                        operator=node.name,
                    )
                )
    return found

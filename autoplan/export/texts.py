"""Functions as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.export.blocks import Function, bracketed
from autoplan.export.stages import StageText

NEVER_SPLIT = '''\
def loss_weights(batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Nothing: the batch is never split."""
    return ()'''


ONE_STAGE = '''\
def actions(rank: int) -> list[tuple[int, str, int]]:
    """(stage, "F" or "B", micro-batch) of a pipeline rank, in order: forwards to warm up, then one of each in turn."""
    warm_up = WARM_UP
    order = [(rank, "F", m) for m in range(warm_up)]
    for m in range(MICRO_BATCHES):
        order.append((rank, "B", m))
        if warm_up + m < MICRO_BATCHES:
            order.append((rank, "F", warm_up + m))
    return order'''

INTERLEAVED = '''\
def actions(rank: int) -> list[tuple[int, str, int]]:
    """(stage, "F" or "B", micro-batch) of a pipeline rank, in order (Narayanan et al. 2021, section 2.2): micro-batches
    in groups of PIPELINE, each group through all of the rank's CHUNKS stages; forwards to warm up, then one of each in
    turn. A count that is no multiple of PIPELINE leaves the first micro-batches of the next one out."""
    missing = -MICRO_BATCHES % PIPELINE
    firsts = range(0, MICRO_BATCHES + missing, PIPELINE)
    order = [(chunk, m) for first in firsts for chunk in range(CHUNKS) for m in range(first, first + PIPELINE)]
    forwards = [(chunk * PIPELINE + rank, "F", m - missing) for chunk, m in order]
    backwards = [((CHUNKS - 1 - chunk) * PIPELINE + rank, "B", m - missing) for chunk, m in order]
    warm_up = min(len(order), 2 * (PIPELINE - 1 - rank) + (CHUNKS - 1) * PIPELINE + 1)
    whole = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        whole += [backward, *forwards[warm_up + index : warm_up + index + 1]]
    return [action for action in whole if action[2] >= 0]'''


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFunction:
    """The function that all stages with one body share."""

    name: str
    source: str


def function_text(function: Function, gathers: Sequence[str]) -> str:
    """A block: ``p`` first, then values. ``gathers``: the parameters that are made whole around it."""
    arguments = ["p: Parameters", *(f"{name}: {kind}" for name, kind in function.inputs)]
    decorator = []
    if gathers:
        decorator = bracketed("@gathers(", [f'"{name}"' for name in gathers], ")")
    return "\n".join(
        [
            *decorator,
            *bracketed(f"def {function.name}(", arguments, f") -> {_returned(function.returns)}:"),
            f'    """{function.summary}"""',
            *function.body,
        ]
    )


def batch_function_text(function: Function, placeholders: Sequence[str]) -> str:
    """A function of the batch alone."""
    unpacked = [
        f'    {name} = batch["{placeholder}"]'
        for (name, _), placeholder in zip(function.inputs, placeholders, strict=True)
    ]
    *body, last = function.body
    results, _, comment = last.removeprefix("    return ").partition("  # ")
    return "\n".join(
        [
            "def loss_weights(batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:",
            '    """What each mean of the loss counts in this part of the batch."""',
            *unpacked,
            *body,
            f"    return ({results},)" + (f"  # {comment}" if comment else ""),
        ]
    )


def distinct_stages(texts: Sequence[StageText]) -> dict[tuple[str, ...], StageFunction]:
    """One function for all stages with the same body, named by where they stand."""
    answer: dict[tuple[str, ...], StageFunction] = {}
    for index, text in enumerate(texts):
        if text.body in answer:
            continue
        name = _stage_name(index, len(texts), taken={each.name for each in answer.values()})
        held = [number for number, other in enumerate(texts) if other.body == text.body]
        answer[text.body] = StageFunction(name=name, source=_stage_source(name, text, held))
    return answer


def _stage_name(index: int, stages: int, taken: set[str]) -> str:
    wanted = "whole_model" if stages == 1 else "first_stage" if index == 0 else "last_stage"
    if 0 < index < stages - 1:
        wanted = "middle_stage"
    return wanted if wanted not in taken else f"{wanted}_{index}"


def _stage_source(name: str, text: StageText, held: Sequence[int]) -> str:
    arguments = ["p: Parameters", "batch: Mapping[str, Tensor]"]
    arguments += [f"layers_{number + 1}: range" for number in range(len(text.ranges))]
    arguments += [f"{received}: Tensor" for received in text.received]
    stages = f"Stage {held[0]}" if len(held) == 1 else f"Stages {held[0]} to {held[-1]}"
    return "\n".join(
        [
            *bracketed(f"def {name}(", arguments, ") -> tuple[Tensor, ...]:"),
            f'    """{stages}."""',
            *text.body,
        ]
    )


def _returned(kinds: Sequence[str]) -> str:
    if not kinds:
        return "None"
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"

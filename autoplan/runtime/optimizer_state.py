"""An optimizer's state by the user's names, so that it can be saved whole and loaded under any other plan.

Torch keeps state a parameter: tensors like the parameter (moments), which are split as it is, and others (step
counts), which are alike on every rank that holds the parameter. Optimizers that look at a parameter's shape keep
tensors of other shapes; they are saved as they are, and only where each rank's parameter is whole. Groups are found
again by the names in them, because a rank's groups hold only what that rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoplan.runtime.checkpoint_files import OPTIMIZER
from autoplan.runtime.faults import CheckpointError
from autoplan.runtime.pieces import pieces
from autoplan.runtime.state import FullTensors
from autoplan.runtime.stored import Part

if TYPE_CHECKING:
    from autoplan.runtime.distributed_file import DistributedFile

Small = dict[str, Any]  # what is no tensor: {"groups": [...], "values": {name: {state: value}}}
_COUNT = "step"  # of every torch optimizer, and never like a parameter, not even like one of no dimensions


def state_of(optimizer: Optimizer, tensors: FullTensors) -> tuple[dict[str, Part], Small]:
    """This rank's parts of the state's tensors by ``optimizer.<parameter>.<state>``, and what is no tensor.

    Raises CheckpointError for a parameter that is not the program's and for state that cannot be put together again.
    """
    names = _names(optimizer, tensors)
    parts: dict[str, Part] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        for key, value in state.items() if name is not None else ():
            assert name is not None
            if not isinstance(value, Tensor):
                _require_small(name, key, value)
                values.setdefault(name, {})[key] = value
            elif key != _COUNT and value.shape == parameter.shape:
                if tensors.writes(name):
                    parts[f"{OPTIMIZER}{name}.{key}"] = tensors.part(name, value)
            else:
                _require_whole(name, key, value, tensors)
                parts[f"{OPTIMIZER}{name}.{key}"] = Part(tuple(value.shape), pieces(value, shape=value.shape))
    groups = [
        {
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]
    return parts, {"groups": groups, "values": values}


def merged(ranks: Iterable[Small]) -> Small:
    """One :data:`Small` for all ranks'. Groups with equal options are one: ranks may lack some, so their places don't
    tell."""
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for rank, small in enumerate(ranks):
        for group in small["groups"]:
            like = next((g for g in groups if rank and repr(g["options"]) == repr(group["options"])), None)
            if like is None:
                groups.append({"names": list(group["names"]), "options": group["options"]})
            else:
                like["names"] = list(dict.fromkeys([*like["names"], *group["names"]]))
        values |= small["values"]
    return {"groups": groups, "values": values}


def load_state(optimizer: Optimizer, tensors: FullTensors, source: DistributedFile, small: Small) -> None:
    """Give ``optimizer`` this rank's part of what was saved, options of its groups included."""
    names = _names(optimizer, tensors)
    known = _states_by_name(source)
    fresh = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    parts: dict[str, Part] = {}
    for group, numbered in zip(optimizer.param_groups, fresh["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            name = names.get(id(parameter))
            if name is None:
                continue
            own: dict[str, Any] = dict(small["values"].get(name, {}))
            for key in known.get(name, ()):
                full = f"{OPTIMIZER}{name}.{key}"
                own[key], parts[full] = _room(name, key, parameter, source.shapes[full], source.dtypes[full], tensors)
            if own:
                state[number] = own
    source.read(parts)
    groups = [
        {**numbered, **_saved_options(index, group, names, small["groups"])}
        for index, (group, numbered) in enumerate(zip(optimizer.param_groups, fresh["param_groups"], strict=True))
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _room(
    name: str, key: str, parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, tensors: FullTensors
) -> tuple[Tensor, Part]:
    """Memory for one tensor of a parameter's state, and the part of the saved one that goes there."""
    split = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    part = tensors.part(name, split)
    if key != _COUNT and part.shape == shape:
        return split, part
    whole = torch.zeros(shape, dtype=dtype, device="cpu" if key == _COUNT else parameter.device)
    _require_whole(name, key, whole, tensors)
    return whole, Part(shape, pieces(whole, shape=shape))


def _states_by_name(source: DistributedFile) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    for full in source.shapes:
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            known.setdefault(name, []).append(key)
    return known


def _saved_options(
    index: int, group: Mapping[str, Any], names: Mapping[int, str], saved: list[dict[str, Any]]
) -> dict[str, Any]:
    """Of the saved group that has this group's first known name; a group without any takes the one at its place."""
    own = [names[id(p)] for p in group["params"] if id(p) in names]
    for candidate in saved if own else ():
        if own[0] in candidate["names"]:
            return candidate["options"]
    if not own and index < len(saved):
        return saved[index]["options"]
    raise CheckpointError(
        f"the checkpoint's optimizer has no group with `{own[0]}`" if own else f"the optimizer's group {index} is new",
        attempt="build the optimizer's groups as when the checkpoint was saved",
    )


def _names(optimizer: Optimizer, tensors: FullTensors) -> dict[int, str]:
    """The user's name of each parameter, by id. A rank without parameters has one of no elements, and no name."""
    names = {id(parameter): name for name, parameter in tensors.parameters().items()}
    held: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [parameter for parameter in held if id(parameter) not in names and parameter.numel()]
    if foreign:
        raise CheckpointError(
            f"the optimizer holds {len(foreign)} parameters that are not this program's, the first of shape "
            f"{tuple(foreign[0].shape)}",
            attempt="build it over program.parameters()",
        )
    return names


def _require_small(name: str, key: str, value: Any) -> None:
    if not isinstance(value, (int, float, bool, str, type(None))):
        raise CheckpointError(
            f"the optimizer keeps `{key}` of `{name}` as {type(value).__name__}, which is not known to split",
            legal="tensors, numbers and texts a parameter (SGD, Adam, AdamW and their like)",
        )


def _require_whole(name: str, key: str, value: Tensor, tensors: FullTensors) -> None:
    """Tensors that are not like the parameter mean the same on every rank only where the parameter is whole."""
    if value.numel() > 1 and not tensors.is_whole(name):
        raise CheckpointError(
            f"the optimizer keeps `{key}` of `{name}`, of shape {tuple(value.shape)}, and the plan splits `{name}`",
            legal="state like the parameter (SGD, Adam, AdamW and their like)",
            attempt='strategy={"zero_stage": 0, "tensor": 1}',
        )

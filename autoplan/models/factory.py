"""``file.py:factory``: the user's own Python builds the model.

The factory takes no arguments and returns a model, (model, example inputs) or (model, example inputs, loss_fn). It
runs under the meta device first, so that a model of any size costs no memory; what does not build there is built as it
stands.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoplan.errors import AutoplanError, ModelError

_RETURNS = "a torch.nn.Module, (model, example inputs) or (model, example inputs, loss_fn)"


def load_factory(reference: str) -> Callable[[], Any]:
    """The callable that ``path/to/file.py:name`` names; raises :class:`ModelError`."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"no such file: {file}", where=reference, attempt="give the path of a Python file")
    module = _run_file(path)
    factory = getattr(module, name, None)
    if factory is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ModelError(
            f"{path.name} has no factory {name!r}",
            where=str(path),
            legal=", ".join(functions) or "the name of a function of that file",
        )
    if not callable(factory):
        raise ModelError(f"{name!r} is not callable: {type(factory).__name__}", where=str(path), legal=_RETURNS)
    _refuse_arguments(factory, name, path)
    return factory


def build(reference: str) -> tuple[nn.Module, Any, Callable[..., Any] | None, tuple[str, ...]]:
    """(model in train mode, example inputs or None, loss_fn or None, assumptions) of ``file.py:factory``."""
    factory = load_factory(reference)
    path = Path(reference.rpartition(":")[0])
    notes: tuple[str, ...] = ()
    try:
        with torch.device("meta"):
            returned = factory()
    except AutoplanError:
        raise
    except Exception:  # may be meta's doing: only the run without it is the user's to answer for
        try:
            returned = factory()
        except Exception as error:
            raise _user_error(error, f"the factory of {path.name} raised", path) from None
        notes = ("the factory does not build on meta, so real weights were made",)
    model, inputs, loss_fn = _unpack(returned, reference)
    if any(parameter.is_meta for parameter in model.parameters()):
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    return model.train(), inputs, loss_fn, notes


def _run_file(path: Path) -> ModuleType:
    """Import the file under a name of its own, its folder importable as for ``python file.py``."""
    name = f"autoplan_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"not a Python file: {path}", where=str(path), legal="file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ModelError(f"cannot read {path.name}: {error.msg}", where=f"{error.filename}:{error.lineno}") from None
    except Exception as error:
        raise _user_error(error, f"{path.name} raised when imported", path) from None
    return module


def _refuse_arguments(factory: Callable[..., Any], name: str, path: Path) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in named]
    if needed:
        raise ModelError(
            f"the factory {name!r} needs arguments: {', '.join(needed)}",
            where=str(path),
            legal="a function that takes none",
            attempt=f"def planned(): return {name}(...), and give {path.name}:planned",
        )


def _unpack(returned: Any, reference: str) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
    parts = returned if isinstance(returned, tuple) else (returned,)
    model, inputs, loss_fn = (*parts, None, None)[:3] if 1 <= len(parts) <= 3 else (None, None, None)
    if isinstance(model, nn.Module) and (loss_fn is None or callable(loss_fn)):
        return model, inputs, loss_fn
    kinds = ", ".join(type(part).__name__ for part in parts)
    shown = f"({kinds})" if isinstance(returned, tuple) else kinds
    raise ModelError(f"the factory returned {shown}", where=reference, legal=_RETURNS)


def _user_error(error: Exception, what: str, path: Path) -> ModelError:
    """Names the last line of the user's own files that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    libraries = [str(Path(torch.__file__).parent), str(Path(sys.prefix) / "lib"), ours, "<frozen"]
    users = [frame for frame in frames if not any(frame.filename.startswith(start) for start in libraries)]
    where = f"{users[-1].filename}:{users[-1].lineno}" if users else str(path)
    return ModelError(f"{what} {type(error).__name__}: {error}", where=where)

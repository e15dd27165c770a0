"""No dropout, wherever the forward asks for it: two runs of a model that drops values have nothing to compare.

Modules and settings are changed in the small copy (:mod:`.shrink`). A rate that the forward itself hands to torch's
functions is only seen when it is called.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

_FUNCTIONS = frozenset(
    f"{kind}dropout{suffix}"
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for suffix in ("", "_", "1d", "2d", "3d")
)
# How the rate is called, and where it stands among the operands.
_RATES = {name: ("p", 1) for name in _FUNCTIONS} | {"scaled_dot_product_attention": ("dropout_p", 4)}


class WithoutDropout(TorchFunctionMode):
    """While inside, rates of dropout that are handed to torch's functions are 0."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (rate := _RATES.get(getattr(function, "__name__", ""))) is not None:
            name, place = rate
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif name in kwargs or name == "p":
                kwargs[name] = 0.0
        return function(*args, **kwargs)

"""The second optimizer of Muon: which parameters AdamW steps, and with which options."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from . import precision

Group = dict[str, Any]

# The options of a fallback group, with the defaults of torch.optim.AdamW.
DEFAULTS: Group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False}


def check(fallback: object) -> None:
    """Raises TypeError unless `fallback` is a dict of AdamW's options and drivetrain's storage options."""
    if not isinstance(fallback, dict):
        raise TypeError(f"fallback is a {type(fallback).__name__}, expected a dict of AdamW's options")
    known = DEFAULTS.keys() | precision.DEFAULTS.keys()
    for name in fallback:
        if name not in known:
            raise TypeError(
                f"fallback has {name!r}, which AdamW has no option for; it takes: {', '.join(sorted(known))}"
            )


def groups_of(params: Any) -> list[Group]:
    """Returns the constructor's parameters as a list of groups, as torch makes them.

    Raises:
        TypeError: The parameters are one tensor, or no iterable.
    """
    if isinstance(params, Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but got " + params.type()
        )
    if not isinstance(params, Iterable):
        raise TypeError(f"params is a {type(params).__name__}, expected an iterable of tensors, pairs or dicts")
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")  # torch's words
    return [*given] if isinstance(given[0], dict) else [{"params": given}]


def split(group: Group, fallback: Group) -> tuple[Group | None, Group | None]:
    """Splits a group into Muon's part and AdamW's part; None stands for a part without parameters.

    A group with `fallback=True` is AdamW's as a whole. Else its matrices are Muon's, and the other parameters take the
    fallback's options instead of the group's.
    """
    options = DEFAULTS | fallback
    if group.get("fallback"):
        return None, options | group
    params = group["params"]
    if isinstance(params, set):  # torch's add_param_group() refuses it.
        return group, None
    entries = [params] if isinstance(params, Tensor) else list(params)
    rest = [entry for entry in entries if not _is_matrix(entry)]
    own = {**group, "params": [entry for entry in entries if _is_matrix(entry)], "fallback": False}
    return own if own["params"] or not rest else None, options | {"params": rest, "fallback": True} if rest else None


def _is_matrix(entry: Any) -> bool:
    """Returns whether an entry, a parameter or a pair of its name and it, is a matrix; torch refuses other things."""
    return getattr(entry[1] if isinstance(entry, tuple) else entry, "ndim", 2) == 2

"""What a call gives to each parameter of a forward; what equals a default counts as not given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

FROM_CONFIG = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")
"""Arguments that Hugging Face's models take from their configuration where a call leaves them out or gives None
(transformers/utils/generic.py, `can_return_tuple`; transformers/modeling_outputs.py)."""

_KEPT = (*FROM_CONFIG, "_output_attentions")
"""Where a configuration keeps them: transformers 5 has a property over one."""

_PLAIN = (bool, int, float, str)


def arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call gives to each parameter of `model.forward`, without what equals its default.

    Mappings become dicts.

    Raises:
        TypeError: The call does not fit the signature.
    """
    given = bind(inspect.signature(type(model).forward), model, args, kwargs)
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}


def bind(
    signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a call gives to each parameter of `signature`, whose first one is the model.

    Two calls that mean the same give the same: an argument that equals its default, or what the configuration of a
    Hugging Face model says in its place, is left out, and further keyword arguments are in alphabetical order.
    """
    found = signature.bind(model, *args, **kwargs).arguments
    given: dict[str, Any] = {}
    for index, (name, value) in enumerate(found.items()):
        if index == 0:
            continue
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= {key: value[key] for key in sorted(value) if not _from_config(model, key, value[key])}
        elif not _is_default(parameter.default, value) and not (
            parameter.default is None and _from_config(model, name, value)
        ):
            given[name] = value
    return given


def alike(one: Any, other: Any) -> bool:
    """Tell whether two constants are the same to a forward: 1, 1.0 and True are not, nor are 0.0 and -0.0; NaN is NaN.

    Sequences are compared item by item; what cannot say whether it equals another, as an array, is alike to itself.
    """
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except Exception:  # a caller's class may refuse in any way it likes
        return False


def _is_default(default: Any, value: Any) -> bool:
    return value is default or (isinstance(value, _PLAIN) and alike(value, default))


def _from_config(model: nn.Module, name: str, value: Any) -> bool:
    """Whether an argument says what a Hugging Face model's configuration says where it is left out."""
    if name not in FROM_CONFIG or not is_hugging_face(model):
        return False
    return value is None or value is getattr(getattr(model, "config", None), name, None)


def said_by_config(model: nn.Module) -> dict[str, Any]:
    """Return what the configuration of a Hugging Face model says in the place of arguments: as it keeps it, unread.

    Reading attributes of a configuration takes longer than a small model's call may.
    """
    config = vars(model).get("config")
    said = {} if config is None else vars(config)
    return {name: said[name] for name in _KEPT if name in said}


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model's class comes from transformers' own base; transformers need not be imported to know it."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)

"""What `encode` of an embedder gives beside an example's features and changes no answer: one graph serves both calls.

sentence-transformers' models take one dict. An example made by a tokenizer, or by hand, lacks entries of it that say
what is so without them: that the input is text, that all tokens are of one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from twofour.compiler.whole_model import by_layers
from twofour.measure.distance import distance

TEXTS = ("a word", "a sentence of several words")
"""What a model is asked to make features of."""


def saying_nothing(model: nn.Module, name: str, example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a model's own features that the example lacks and the layers' answer does not change by.

    Args:
        model: The model with compiled layers; models that make no features have none.
        name: The argument that takes features.
        example: What a call gives to each parameter.
    """
    own = _features(model)
    held = example[name].keys()
    if own is None or not held < own.keys():
        return {}
    rest = {key: value for key, value in own.items() if key not in held}
    if not all(_is_neutral(value) for value in rest.values()):
        return {}
    calls = dict(own), {key: own[key] for key in held}
    want, found = (by_layers(model, {**example, name: features}) for features in calls)
    if not found.keys() <= want.keys():
        return {}
    pairs = [(found[key], want[key]) for key in found if isinstance(found[key], Tensor)]
    return rest if pairs and distance(*([*column] for column in zip(*pairs, strict=True))) == 0 else {}


def _features(model: nn.Module) -> Mapping[str, Any] | None:
    make: Callable[..., Any] | None = getattr(model, "preprocess", None) or getattr(model, "tokenize", None)
    if not callable(make):
        return None
    try:
        found = make([*TEXTS])
    except Exception:  # it makes them of something else than texts
        return None
    return found if isinstance(found, Mapping) else None


def _is_neutral(value: Any) -> bool:
    return not value.any() if isinstance(value, Tensor) else isinstance(value, str | bool | int | None)

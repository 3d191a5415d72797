"""What forwards and answers of transformers call their cache: `past_key_values` until 5.23, and `cache` since."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

from torch import nn

NAMES = ("past_key_values", "cache")
"""What a cache is called, the older name first."""


def name_of(named: Container[str]) -> str:
    """Return what arguments or fields of these names call a cache; the older name where they have none."""
    return NAMES[1] if NAMES[1] in named and NAMES[0] not in named else NAMES[0]


def argument_of(model: nn.Module) -> str:
    """Return the name under which the forward of a model takes its cache."""
    return name_of(inspect.signature(type(model).forward).parameters)


def cache_in(given: Any) -> Any:
    """Return the cache among arguments or fields by name, None where there is none."""
    return given.get(name_of(given.keys())) if isinstance(given, dict) else None


def answer_with(kind: Any, fields: dict[str, Any], cache: Any) -> Any:
    """Return an answer of this class with a cache."""
    return kind(**fields, **{name_of(kind.__dataclass_fields__): cache})

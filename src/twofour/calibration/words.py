"""Words for what a caller passes as calibration data: what it is, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

TOKENISE = (
    'tokenise sentences, [tokenizer(sentences, padding=True, return_tensors="pt")], or TwoFourConfig(data=sentences), '
    "which does it"
)
"""What becomes of text."""


def conversion(item: Any) -> str:
    """Say how what holds no tensor becomes a batch."""
    match item:
        case str() | [str(), *_]:
            return TOKENISE
        case Mapping() if item:
            return 'convert its values, for instance by torch.as_tensor; return_tensors="pt" has a tokenizer do it'
        case _:
            return "convert it, for instance by torch.as_tensor"


def shapes(value: Any) -> str:
    """Say the shapes of all tensors in a value."""
    found = [str(tuple(leaf.shape)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return f"shape {', '.join(found)}"


def described(value: Any) -> str:
    """Say a value's type, and how many entries it has where it is a container."""
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict | str) else ""
    return f"{type(value).__name__}{size}"

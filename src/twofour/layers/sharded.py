"""Weights that are sharded over processes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def is_distributed(tensor: Tensor) -> bool:
    """Whether the tensor is sharded over processes (a DTensor, as FSDP2 makes them)."""
    if type(tensor) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; for a sharded one (DTensor) every process must call this together."""
    return cast(Any, tensor).full_tensor() if is_distributed(tensor) else tensor

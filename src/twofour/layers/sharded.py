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


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; for a sharded one (DTensor) every process must call this together."""
    return cast(Any, tensor).full_tensor() if is_distributed(tensor) else tensor


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, of the shape of `like`, sharded over processes as `like` is; each holds no more than its part.

    From whole to sharded nothing is sent. From sharded to whole, or to another sharding, every process must call this
    together.
    """
    if not is_distributed(like):
        return full_tensor(tensor)
    from torch.distributed.tensor import DTensor, Replicate

    wanted = cast(Any, like)
    mesh = wanted.device_mesh
    if is_distributed(tensor):
        if cast(Any, tensor).device_mesh == mesh:
            return cast(Any, tensor).redistribute(mesh, wanted.placements)
        tensor = full_tensor(tensor)
    replicated = DTensor.from_local(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = replicated.redistribute(mesh, wanted.placements).to_local()
    # A part that is a view would hold on to the whole.
    return DTensor.from_local(
        part.clone(), mesh, wanted.placements, run_check=False, shape=wanted.shape, stride=wanted.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return cast(Any, tensor).to_local() if is_distributed(tensor) else tensor

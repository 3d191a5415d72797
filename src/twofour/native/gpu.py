"""The GPU: whether CUDA and Triton can be used here, and if not, why."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch


def unavailable(capability: tuple[int, int] = (8, 0), *, triton: bool = False) -> str | None:
    """Return why a CUDA kernel cannot run here, or None when it can.

    Args:
        capability: Least compute capability; 2:4 begins with (8, 0), Ampere.
        triton: The kernel is written in Triton; in its interpreter it runs on the CPU, for tests.
    """
    if triton and find_spec("triton") is None:
        return "needs the package triton"
    if triton and interpreted():
        return None
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU: " + ("none found" if torch.version.cuda else "this build of torch has no CUDA")
    found = torch.cuda.get_device_capability()
    if found < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, this GPU has {found[0]}.{found[1]}"
    return None


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors: the variable TRITON_INTERPRET."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes")


def device() -> torch.device:
    """Return where the kernels' operands live: the current GPU, or the CPU in Triton's interpreter."""
    return torch.device("cpu") if interpreted() else torch.device("cuda", torch.cuda.current_device())


def runs(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels run on this tensor: it is on a GPU that has them, or they are interpreted."""
    return (tensor.is_cuda or (interpreted() and tensor.is_cpu)) and _triton() is None


@cache
def _triton() -> str | None:
    return unavailable(triton=True)


@cache
def name() -> str:
    """Return the GPU and its architecture, such as "NVIDIA H200, sm_90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}"


@cache
def processors() -> int:
    """Return how many streaming multiprocessors the GPU has."""
    return cast(Any, torch.cuda).get_device_properties(device()).multi_processor_count


@cache
def l2_bytes() -> int:
    """Return the size of the GPU's second-level cache in bytes."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

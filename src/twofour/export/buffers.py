"""Buffers that no checkpoint holds, of a Hugging Face model on the meta device: computed as its constructor does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from twofour.capture.call import is_hugging_face


def fill_buffers(model: nn.Module) -> None:
    """Give the non-persistent buffers that are on the meta device the values that their constructor computes.

    `position_ids` of BERT and the frequencies of rotary embeddings follow from the configuration: the innermost
    Hugging Face model around a buffer is built again from it, its parameters without values, and its buffers are taken.
    What belongs to no such model stays as it is.
    """
    built: dict[str, nn.Module] = {}
    for name, module in list(model.named_modules()):
        empty = [key for key in module._non_persistent_buffers_set if _is_empty(module._buffers.get(key))]
        for around in _around(name) if empty else ():
            owner = model.get_submodule(around)
            config = getattr(owner, "config", None)
            if not is_hugging_face(owner) or config is None:
                continue
            if around not in built:
                with _parameters_without_values():
                    built[around] = type(owner)(copy.deepcopy(config))
            twin = built[around].get_submodule(name.removeprefix(around).lstrip("."))
            for key in empty:
                found, wanted = twin._buffers.get(key), module._buffers[key]
                if found is not None and wanted is not None and _alike(found, wanted):
                    module._buffers[key] = found
            break


def _is_empty(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def _alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return not found.is_meta and found.shape == wanted.shape and found.dtype == wanted.dtype


def _around(name: str) -> list[str]:
    """Return the names of the modules around one and its own, the innermost first; "" is the model."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


@contextmanager
def _parameters_without_values() -> Iterator[None]:
    """Put every parameter that this thread registers inside on the meta device: none is initialised or kept."""
    own = threading.get_ident()

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or threading.get_ident() != own:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            yield
    finally:
        handle.remove()

"""Make a neural network 2:4 sparse, prove that it is as accurate, and run it faster on the machine you have."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from twofour.registration import once_imported

if TYPE_CHECKING:
    from twofour import (
        allocation,
        hardware,
        importing,
        kernels,
        masks,
        measure,
        packing,
        patterns,
        quantization,
        shrinking,
        structure,
        training,
    )
    from twofour.checker import check
    from twofour.compiler import advise, compile
    from twofour.export import load, save
    from twofour.hardware import estimate
    from twofour.importing import read
    from twofour.optimizing import optimize
    from twofour.pruning import prune
    from twofour.quantization import quantize
    from twofour.shrinking import shrink
    from twofour.simplification import simplify
    from twofour.training import finetune

try:
    __version__ = version("twofour")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

# Verbs in pipeline order; each is imported from its stage when it is first used, so that `import twofour` is cheap.
_VERBS = {
    "simplify": "twofour.simplification",
    "shrink": "twofour.shrinking",
    "prune": "twofour.pruning",
    "finetune": "twofour.training",
    "quantize": "twofour.quantization",
    "compile": "twofour.compiler",
    "advise": "twofour.compiler",
    "save": "twofour.export",
    "load": "twofour.export",
    "read": "twofour.importing",
    "optimize": "twofour.optimizing",
    "check": "twofour.checker",
    "estimate": "twofour.hardware",
}
_STAGES = (
    "allocation",
    "hardware",
    "importing",
    "kernels",
    "masks",
    "measure",
    "packing",
    "patterns",
    "quantization",
    "shrinking",
    "structure",
    "training",
)

__all__ = [
    "advise",
    "allocation",
    "check",
    "compile",
    "estimate",
    "finetune",
    "hardware",
    "importing",
    "kernels",
    "load",
    "masks",
    "measure",
    "optimize",
    "packing",
    "patterns",
    "prune",
    "quantization",
    "quantize",
    "read",
    "save",
    "shrink",
    "shrinking",
    "simplify",
    "structure",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(_VERBS[name]), name)
    if name in _STAGES:
        return import_module(f"twofour.{name}")
    if name == "permutation":  # its name before it was a part of structure
        return import_module("twofour.structure.permutation")
    if not name.startswith("_") and find_spec(f"twofour.{name}") is not None:  # the other stages, as export
        return import_module(f"twofour.{name}")
    raise AttributeError(f"module 'twofour' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# transformers has no entry point for quantizers: ours is registered when its registry is imported, here or later.
once_imported("transformers.quantizers.auto", "twofour.integrations")

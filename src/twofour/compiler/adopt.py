"""A compiled copy in the place of the model it was made of: for callers who hold the model itself."""

from __future__ import annotations

from torch import nn

from twofour.compiler.inductor import InductorModel
from twofour.compiler.whole_model import WholeModel


def adopt(model: nn.Module, fast: nn.Module) -> None:
    """Let `model` be the compiled model that `fast` is, which must not be used any more.

    `compile` and `load` return a copy, and a library that made the model itself may have no way to return another one.
    What torch keeps on a module comes from `fast`, and what it alone has: its plan, settings and engine. Other
    attributes of `model` stay, and its own weights are freed.

    Args:
        model: What `fast` was compiled of or loaded for, of the same class.
        fast: From `compile` or `load`.
    """
    torchs = vars(nn.Module()).keys()
    for name, value in vars(fast).items():
        if name in torchs or name not in vars(model):
            vars(model)[name] = value
    engine = vars(model).get("forward")
    if isinstance(engine, WholeModel | InductorModel):
        engine.__setstate__({**engine.__getstate__(), "model": model})

"""Other libraries' calls that would lose the weights of a compiled model without a word: refused, or said aloud."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NoReturn

from torch import nn

from twofour.errors import ExportError
from twofour.layers import CompiledLayer, apply_or_refuse

logger = logging.getLogger("twofour.compiler")


def watch(fast: nn.Module) -> None:
    """Refuse `save_pretrained` of a compiled model and its parts, and say which weights `load_state_dict` passes by.

    `half` and the like change the whole model, or raise and change nothing.

    The state dict holds biases and norms, not packed weights, so that transformers would write a checkpoint without
    them. What is put on the instances are functions of this module: copies and pickles of the model keep them.
    """
    for module in fast.modules():
        holds = module is fast or any(isinstance(part, CompiledLayer) for part in module.modules())
        if holds and callable(getattr(type(module), "save_pretrained", None)):
            object.__setattr__(module, "save_pretrained", refuse_save_pretrained)
    object.__setattr__(fast, "_apply", partial(apply_or_refuse, fast))
    fast.register_load_state_dict_post_hook(say_not_taken)


def refuse_save_pretrained(*_: Any, **__: Any) -> NoReturn:
    """Refuse what stands in a compiled model's place of `save_pretrained`.

    Raises:
        ExportError: Always.
    """
    raise ExportError(
        "a compiled model has no checkpoint of transformers",
        got="save_pretrained, which writes the state dict: the packed weights are not in it",
        wanted="twofour.save(compiled, path), or the masked model that was compiled",
        remedy="twofour.export.to_huggingface(masked, folder) writes what from_pretrained reads; of a saved file: "
        "twofour.load(path, model, masked=True) first",
    )


def say_not_taken(model: nn.Module, keys: Any) -> None:
    """Warn of weights in a loaded state dict that belong to compiled layers, which keep their packed ones.

    Args:
        model: The compiled model.
        keys: `missing_keys` and `unexpected_keys`, as torch hands them to hooks after `load_state_dict`.
    """
    modules = model.named_modules(remove_duplicate=False)
    ours = {
        f"{name}.{weight}".lstrip(".")
        for name, module in modules
        if isinstance(module, CompiledLayer)
        for weight in module.weight_names
    }
    # The compiled model may be a part of what is loaded, whose name then stands before those of its layers.
    passed = [key for key in keys.unexpected_keys if any(key == name or key.endswith(f".{name}") for name in ours)]
    if passed:
        shown = ", ".join(f"`{key}`" for key in passed[:4]) + (f" and {len(passed) - 4} more" if passed[4:] else "")
        logger.warning(
            "load_state_dict: %s not taken: a compiled layer keeps the weight that it was compiled with, while biases "
            "are replaced; load them into the model that was compiled, and compile it again",
            shown,
        )

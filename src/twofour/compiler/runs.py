"""Whether a model runs on its example, and what its caller is told where it does not."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from twofour import calls
from twofour.calls import Example
from twofour.compiler.conv import answer_in_order
from twofour.errors import CompileError, TwofourError

logger = logging.getLogger("twofour.compiler")


def require_runs(fast: nn.Module, example: Example | None) -> None:
    """Run the example, where there is one, once through a compiled model, before anything is timed on it.

    Raises:
        CompileError: The compiled model does not run on it.
    """
    if example is None:
        return
    try:
        example.run(fast)
    except MemoryError:
        raise
    except Exception as error:
        if not _runs_in_order(fast, example):
            raise unfit(fast, example, error, getattr(error, "layer", None)) from error


def _runs_in_order(fast: nn.Module, example: Example) -> bool:
    """Tell whether the model runs once its convolutions answer in the memory order of their input, and say so."""
    if not answer_in_order(fast):
        return False
    try:
        example.run(fast)
    except Exception:  # the caller has the first one
        return False
    logger.warning(
        "the model takes a `view` of what a convolution answers, so each copies its answer into the order of its input "
        "where layers run by themselves; flatten or reshape in the place of view needs no copy"
    )
    return True


def unfit(model: nn.Module, example: Example, error: Exception, layer: str | None) -> CompileError:
    """Build the error for an example that the model does not run on; `layer`: the one that raised, where known."""
    if _lacks_decoder(model, example, error):
        return calls.unfit(
            CompileError,
            "the example: it gives the encoder alone its input, and the decoder none",
            error,
            wanted="`decoder_input_ids` too, of two axes (batch, tokens)",
            remedy=_with_decoder(model, example),
            shown=f"an example of {', '.join(map(repr, example.kwargs)) or 'positional arguments'}",
        )
    leaves = [leaf for leaf in example.leaves if isinstance(leaf, Tensor)]
    given = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves) or "no tensor"
    known = list(dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point()))
    if not example.args and not example.kwargs:
        given, remedy = "an empty example", "pass the input of one forward pass, or leave the example out"
    elif isinstance(error, TwofourError) and error.remedy:
        remedy = error.remedy
    elif any(isinstance(leaf, np.ndarray) for leaf in example.leaves):
        remedy = "make a tensor of an array: torch.from_numpy(example)"
    elif any(leaf.is_meta for leaf in leaves) and not any(p.is_meta for p in model.parameters()):
        remedy = "pass an example with values: one on the meta device has none"
    elif known and any(leaf.is_floating_point() and leaf.dtype not in known for leaf in leaves):
        remedy = f"convert it to the model's dtype: example.to({known[0]})"
    elif len(example.args) > 1:
        remedy = "check the arguments, which a tuple or a list is spread over: ([a, b],) is one argument, a list"
    else:
        remedy = "check its sizes and dtypes: an example must be what the model takes in one forward pass"
    return calls.unfit(CompileError, "the example", error, wanted=calls.FORMS, remedy=remedy, shown=given, layer=layer)


_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
"""What an encoder-decoder of transformers makes its decoder's input of."""


def _with_decoder(model: nn.Module, example: Example) -> str:
    """Return an example with the decoder's first token, under the names of the model's own inputs."""
    name = next(iter(example.kwargs), str(getattr(model, "main_input_name", "input_ids")))
    rows = next((len(leaf) for leaf in example.leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
    config: object = getattr(model, "config", None)
    starts = (getattr(config, key, None) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((token for token in starts if isinstance(token, int)), 0)
    first = f'"decoder_input_ids": torch.full(({rows}, 1), {start})'
    return f'example={{"{name}": ..., {first}}}: the token that its decoder starts with'


def _lacks_decoder(model: nn.Module, example: Example, error: Exception) -> bool:
    """Tell whether what an encoder-decoder of transformers misses is its decoder's input; BART's makes its own.

    Either the error speaks of that input, or the example runs with one.
    """
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True
    if not two or len(example.args) >= 3 or any(name in example.kwargs for name in _OF_DECODER):
        return False
    if isinstance(error, ValueError) and "decoder_input" in str(error):
        return True
    first = next((leaf for leaf in example.leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None:
        return False
    tokens = torch.zeros(len(first), 1, dtype=torch.long, device=first.device)
    try:
        replace(example, kwargs={**example.kwargs, "decoder_input_ids": tokens}).run(model)
    except Exception:  # the caller has the first one
        return False
    return True

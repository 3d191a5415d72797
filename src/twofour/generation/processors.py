"""transformers' processors of scores, asked as its own list asks them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Processors:
    """Processors of scores. Those that hide words are done anew: to look for Whisper's 88 took 4 ms a token.

    Args:
        given: As transformers prepared them; none takes more than tokens and scores.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._each = [_hiding(one) or one for one in given]

    @classmethod
    def of(cls, given: Any) -> Any:
        """Return what does as `given` does, itself where it is no list of transformers'; None where it is empty."""
        from transformers import LogitsProcessorList

        if type(given) is not LogitsProcessorList or not all(len(_parameters(one)) == 2 for one in given):
            return given or None
        return cls(given) if given else None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (rows, words) behind tokens (rows, tokens), float32."""
        for one in self._each:
            scores = one(ids, scores)
        return scores


def _parameters(processor: Any) -> Any:
    return inspect.signature(processor if inspect.isroutine(processor) else processor.__call__).parameters


def _hiding(processor: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what hides the words that a processor of transformers hides, None for another processor."""
    from transformers.generation import logits_process

    own: Any = logits_process
    if type(processor) is own.SuppressTokensLogitsProcessor:
        return _Hidden(processor.suppress_tokens)
    if type(processor) is not own.SuppressTokensAtBeginLogitsProcessor:
        return None
    hidden = _Hidden(processor.begin_suppress_tokens)
    return lambda ids, scores: hidden(ids, scores) if ids.shape[-1] == processor.begin_index else scores


class _Hidden:
    """Gives words the least of all scores.

    Args:
        words: Their numbers; those that there are no scores of are passed by.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words.reshape(-1)

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        known = self._words[(self._words >= 0) & (self._words < scores.shape[-1])]
        return scores.index_fill(-1, known.long(), -torch.inf)

"""`generate` of a compiled model: greedy decoding and sampling in a loop of its own, all else in transformers'.

transformers makes the arguments of every step anew, and hands the cache to the model and back. Here a step is one call
of what `compiler` made. What `generate` prepares is transformers' own: configuration, prompt, processors of scores,
criteria of stopping. So are the operations that make a token of scores, in their order: the tokens are the same,
sampled ones too.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from twofour.generation.names import answer_with, cache_in
from twofour.generation.processors import Processors

logger = logging.getLogger("twofour.generation")

MODES = ("greedy_search", "sample")
"""As transformers calls the ways to generate one token after the other."""

METHODS = ("generate", "_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods of transformers that a model may have its own of, which this loop would pass by."""

WRAPPED = {
    "generate": "transformers.models.whisper.generation_whisper",
    "prepare_inputs_for_generation": "transformers.models.whisper.modeling_whisper",
}
"""Modules of such methods that end in transformers' own: Whisper's, which hands this loop on for each segment."""

LEFT = "generate() %s runs in transformers' own loop, with graphs where they serve"
"""What is said of a call that this loop does not do, with which."""

SERVED = """generate() takes one token after the other in a loop of its own; beam search, assistants, hidden states, \
hooks and prompts in chunks keep transformers'"""
"""What a plan says of a model that this loop serves."""

BESIDE = ("custom_generate", "assistant_model", "assistant_tokenizer", "tokenizer", "synced_gpus", "trust_remote_code")
"""Arguments of `generate` for what this loop does not do."""


class Steps(Protocol):
    """The steps behind one prompt; `first`: its logits, (rows, words), which are the caller's."""

    first: Tensor

    def next(self, tokens: np.ndarray) -> Tensor:
        """Return the logits behind one more token of each row, (rows, words), which are the caller's."""
        ...

    def hand(self) -> None:
        """Let the cache hold all keys and values."""
        ...


def left_out(model: nn.Module) -> str:
    """Return which models' `generate` stays transformers' whole, this one among them; "" where this loop serves."""
    from transformers import GenerationMixin

    own: Any = GenerationMixin
    kind: Any = type(model)
    takes = inspect.signature(own.generate).parameters.get("custom_generate")
    old = _crosses(model) and not hasattr(own, "_prefill")
    if old or takes is None or "Callable" not in str(takes.annotation):
        return "with this version of transformers, which takes no other loop,"
    other = (
        name
        for name in METHODS
        if (found := getattr(kind, name, None)) is not getattr(own, name)
        and getattr(found, "__module__", "") != WRAPPED.get(name)
    )
    changed = next(other, "")
    return f"of a model with a `{changed}` of its own" if changed else ""


def _crosses(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class _OtherModeError(Exception):
    """The prepared configuration asks for another way to generate than it seemed."""


class Generation:
    """The `generate` of a compiled decoder or encoder-decoder.

    Args:
        model: The model.
        refused: Why no `Steps` may be made of a model, token ids and what its forward is given besides; "" elsewhere.
        steps: Makes them, of the same and the prepared configuration.
    """

    def __init__(self, model: nn.Module, refused: Callable[..., str], steps: Callable[..., Steps]) -> None:
        self.model: Any = model
        self.refused, self.steps = refused, steps
        self._said: set[str] = set()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.model).generate, self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what transformers' `generate` returns; without names it takes inputs and a configuration."""
        whole = partial(type(self.model).generate, self.model, *args)
        why = self._other(args, kwargs)
        if not why:
            try:
                loop = partial(self._loop, kwargs.get("streamer"), cache_in(kwargs) is not None)
                return whole(**kwargs | {"custom_generate": loop})
            except _OtherModeError as error:
                why = str(error)
        self._say(why)
        return whole(**kwargs)

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why a call is transformers' whole, "" where it asks for one token after the other."""
        if len(args) > 2:
            return "with more than two arguments without names"
        if named := [name for name in BESIDE if kwargs.get(name) is not None]:
            return f"with `{named[0]}`"
        if changed := [name for name in METHODS[1:] if name in vars(self.model)]:
            return f"of a model with a `{changed[0]}` of its own"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "in several processes"
        asked = copy.copy(self.model.generation_config)
        configured = args[1] if len(args) == 2 else kwargs.get("generation_config")
        given = {} if configured is None else vars(configured)
        vars(asked).update({name: value for name, value in given.items() if value is not None})
        vars(asked).update({name: value for name, value in kwargs.items() if name in vars(asked)})
        return _mode(asked)

    def _loop(
        self, streamer: Any, shown: bool, model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """Do as transformers' `_sample`; a cache that is `shown`, the caller's, has all keys after every step."""
        config = generation_config
        if why := _mode(config):  # transformers 4 joins two configurations in ways of its own
            raise _OtherModeError(why)
        if why := _more(config) or self.refused(model, input_ids, given):
            self._say(why)
            prepared = input_ids, logits_processor, stopping_criteria, config
            return type(model)._sample(model, *prepared, streamer=streamer, **given)
        choose, processed = _sampled if config.do_sample else _likeliest, Processors.of(logits_processor)
        ends, kept, pad = _Ends(stopping_criteria), _Kept(config), config._pad_token_tensor
        ids, unfinished = input_ids.numpy(), np.ones(len(input_ids), dtype=bool)
        steps = self.steps(model, input_ids, given, config)
        logits = steps.first
        try:
            while True:
                scores = raw = logits.float()
                if processed:
                    scores = processed(torch.from_numpy(ids), raw)
                tokens = choose(kept.noted(scores, raw))
                if ends.pads and not unfinished.all():
                    tokens = np.where(unfinished, tokens, int(pad))
                ids = np.concatenate([ids, tokens[:, None]], 1)
                unfinished &= ~ends(ids, kept.scores)
                if streamer is not None:
                    streamer.put(torch.from_numpy(tokens))
                if not unfinished.any():
                    break
                logits = steps.next(tokens)
                if shown:
                    steps.hand()
        finally:
            steps.hand()
        if streamer is not None:
            streamer.end()
        return kept.answer(torch.from_numpy(ids), cache_in(given), _crosses(model))

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.info(f"{LEFT} (said once)", why)


def _mode(config: Any) -> str:
    """Return which other way to generate a configuration asks for, "" for one token after the other."""
    mode = config.get_generation_mode().value
    return "" if mode in MODES else f"by {mode.replace('_', ' ')}"


def _more(config: Any) -> str:
    """Return what a configuration asks for beside tokens, "" for nothing."""
    asked = ("prefill_chunk_size", "is_assistant", "compile_config")
    return next((f"with `{name}`" for name in asked if getattr(config, name, None)), "")


class _Kept:
    """What a configuration asks for beside tokens: scores and logits of each, (rows, words), and the cache.

    Attributes:
        scores: After the processors; None where they are not asked for.
        logits: Before them.
    """

    def __init__(self, config: Any) -> None:
        self.whole = bool(config.return_dict_in_generate)
        self.scores: Any = () if self.whole and config.output_scores else None
        self.logits: Any = () if self.whole and config.output_logits else None

    def noted(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Keep those of one token; returns its scores."""
        self.scores = None if self.scores is None else (*self.scores, scores)
        self.logits = None if self.logits is None else (*self.logits, logits)
        return scores

    def answer(self, ids: Tensor, cache: Any, crosses: bool) -> Any:
        """Return what `generate` answers, of an encoder-decoder where it `crosses`."""
        if not self.whole:
            return ids
        from transformers.generation import utils

        kind: Any = utils.GenerateEncoderDecoderOutput if crosses else utils.GenerateDecoderOnlyOutput
        return answer_with(kind, {"sequences": ids, "scores": self.scores, "logits": self.logits}, cache)


class _Ends:
    """Criteria of stopping; those that every call has are asked without tensors, which wait for memory in a step.

    Args:
        criteria: As transformers prepared them.

    Attributes:
        pads: Whether rows end before others, which are filled up.
    """

    def __init__(self, criteria: Sequence[Any]) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        words = [one for one in criteria if type(one) is EosTokenCriteria]
        lengths = [one for one in criteria if type(one) is MaxLengthCriteria and not _warns(one)]
        self.words = np.concatenate([one.eos_token_id.numpy().reshape(-1) for one in words]) if words else None
        self.most = min((one.max_length for one in lengths), default=sys.maxsize)
        self.others = [one for one in criteria if one not in (*words, *lengths)]

    def __call__(self, ids: np.ndarray, scores: tuple[Tensor, ...] | None) -> np.ndarray:
        """Tell which rows of tokens (rows, tokens) have come to an end, bool (rows); scores are those that are kept."""
        ended = np.full(len(ids), ids.shape[1] >= self.most)
        if self.words is not None:
            ended |= (ids[:, -1:] == self.words).any(1)
        for one in self.others:
            answer = torch.from_numpy(ended) | one(torch.from_numpy(ids), scores)
            ended = (answer.numpy() & 1).astype(bool)  # of whole numbers transformers reads the last bit
        return ended


def _warns(criterion: Any) -> bool:
    """Tell whether a limit of length is beyond the model's positions: then it is transformers that says so."""
    positions = criterion.max_position_embeddings
    return positions is not None and criterion.max_length > positions


def _likeliest(scores: Tensor) -> np.ndarray:
    scores = scores.float() if scores.dtype is torch.bfloat16 else scores  # which numpy has not
    return scores.numpy().argmax(-1)  # torch's takes 20 times as long for the words of GPT-2


def _sampled(scores: Tensor) -> np.ndarray:
    return torch.multinomial(scores.softmax(-1), 1).squeeze(1).numpy()

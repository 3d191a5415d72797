"""The call that `generate` makes of an encoder-decoder: one token behind its own keys and those of the encoder.

As in `cache_calls`. The first call, which computes the encoder's keys, runs layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour.compiler.cache_calls import UNSEEN, Call, RefusedError, fields_of, joined, pair_of
from twofour.generation.caches import Buffers, Pair, cache_of, is_served, recording_cache
from twofour.generation.names import argument_of, cache_in

Known = tuple[Tensor, Tensor, list[Pair], list[Pair]]
"""What an encoder left and a cache holds: its answer (rows, length, width), which of it is seen, int64 (rows, length),
and keys and values of each layer, the decoder's own and the encoder's."""


def crossed(keys: Sequence[Pair], encoder: Sequence[Pair]) -> Any:
    """Return a cache of two: of a decoder's own keys, and of its encoder's."""
    from transformers import EncoderDecoderCache

    return EncoderDecoderCache(cache_of(keys), cache_of(encoder))


def answer_of(hidden: Tensor) -> Any:
    """Return an encoder's answer as `generate` hands it on."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


OVERLOOKING = ("whisper",)
"""Kinds of models whose attention mask of features says nothing to a decoder."""


class CrossStep:
    """One token behind the keys of two caches.

    Args:
        model: The model.

    Attributes:
        kind: Class of the model's answers.
        count: Layers of its decoder.
        masked: Whether the encoder's tokens may be hidden: of words they may, of features none are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kind: Any = None
        self.count = 0
        self.argument = argument_of(model)
        self.masked = getattr(model, "main_input_name", "input_ids") == "input_ids"

    def begin(self, given: Mapping[str, Any]) -> Known:
        """Run an example; return what it leaves behind.

        Raises:
            RefusedError: The model answers without two caches of keys that grow.
        """
        answer = type(self.model).forward(self.model, **{**given, "use_cache": True})
        cache = cache_in(answer)
        own: Any = getattr(cache, "self_attention_cache", None)
        other: Any = getattr(cache, "cross_attention_cache", None)
        layers = len(getattr(own, "layers", ()))
        if not layers or not is_served(own, layers) or not is_served(other, layers):
            raise RefusedError("its cache has layers of other kinds than keys and values that grow")
        held = min(sum(layer.is_initialized for layer in one.layers) for one in (own, other))
        if held < layers:
            raise RefusedError(
                f"its cache has {layers} layers, of which its decoder fills {held}: `num_hidden_layers` of the "
                f"decoder's config counts others; set it to {held}"
            )
        self.kind, self.count = type(answer), layers
        hidden = answer.encoder_last_hidden_state
        seen = given.get("attention_mask") if self.masked else None
        seen = torch.ones(hidden.shape[:2], dtype=torch.int64, device="cpu") if seen is None else seen.ne(0).long()
        return hidden, seen, [pair_of(layer) for layer in own.layers], [pair_of(layer) for layer in other.layers]

    def layers(self, ids: Tensor, known: Known) -> Any:
        """Return the model's answer to one token (rows, 1)."""
        return self._answer(ids, known, known[1] if self.masked else None)

    def overlooks(self, ids: Tensor, known: Known) -> bool:
        """Tell whether a step answers the same whatever of the encoder a mask hides, as Whisper's does.

        Masks that change nothing here prove nothing of others, such as all zeros, which wav2vec2 takes for ones: other
        kinds of models are not asked.
        """
        if getattr(getattr(self.model, "config", None), "model_type", "") not in OVERLOOKING:
            return False
        whole, half = self._answer(ids, known, None).logits, torch.zeros_like(known[1])
        half[:, : half.shape[1] // 2] = 1
        try:
            hidden = [self._answer(ids, known, seen).logits for seen in (half, torch.zeros_like(half))]
        except (RuntimeError, ValueError, TypeError, IndexError):  # it asks for a mask of another shape: it reads it
            return False
        return all(torch.equal(one, whole) for one in hidden)

    def _answer(self, ids: Tensor, known: Known, seen: Tensor | None) -> Any:
        hidden, _, past, cross = known
        hides = {} if seen is None else {"attention_mask": seen}
        given = {"decoder_input_ids": ids, "encoder_outputs": answer_of(hidden), "use_cache": True, **hides}
        return type(self.model).forward(self.model, **given, **{self.argument: crossed(past, cross)})

    def leaves(self, ids: Tensor, known: Known) -> list[Any]:
        """Return what the graph is to answer."""
        answer = self.layers(ids, known)
        own = cache_in(answer).self_attention_cache.layers
        added = [tensor[:, :, -1:] for layer in own for tensor in pair_of(layer)]
        return [*tree_leaves(self.fields(answer)), *tree_leaves(joined(added))]

    def fields(self, answer: Any) -> dict[str, Any]:
        """Return what a model answers beside its cache and what the encoder answered."""
        return {name: value for name, value in fields_of(answer).items() if name != "encoder_last_hidden_state"}

    def example(self, ids: Tensor, known: Known) -> Call:
        """Return what the graph is given; keys that nobody sees are large, so that a graph that sees them shows."""
        hidden, seen, past, cross = known
        buffers = Buffers(past)
        for tensor in buffers.leaves:
            tensor[:, :, buffers.length :] = UNSEEN
        pairs = list(zip(buffers.leaves[::2], buffers.leaves[1::2], strict=True))
        length = torch.tensor(buffers.length, dtype=torch.int64, device="cpu")
        hides = {"attention_mask": seen} if self.masked else {}
        given = {"decoder_input_ids": ids.contiguous(), "length": length, "decoder_attention_mask": buffers.mask}
        return {**given, **hides, "hidden": hidden, "past": pairs, "cross": cross}

    @property
    def captured(self) -> Any:
        """What returns answer and added keys and values, for the capture; keys that a mask hides may be anything."""
        return self._masked if self.masked else self._whole

    def _masked(
        self, decoder_input_ids: Tensor, length: Tensor, decoder_attention_mask: Tensor, attention_mask: Tensor,
        hidden: Tensor, past: list[Pair], cross: list[Pair],
    ) -> Any:  # fmt: skip
        given = {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        return self._captured({**given, "attention_mask": attention_mask}, length, hidden, past, cross)

    def _whole(
        self, decoder_input_ids: Tensor, length: Tensor, decoder_attention_mask: Tensor, hidden: Tensor,
        past: list[Pair], cross: list[Pair],
    ) -> Any:  # fmt: skip
        given = {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        return self._captured(given, length, hidden, past, cross)

    def _captured(self, given: Call, length: Tensor, hidden: Tensor, past: list[Pair], cross: list[Pair]) -> Any:
        from transformers import EncoderDecoderCache

        own, layers = recording_cache(past, length)
        cache = EncoderDecoderCache(own, cache_of(cross))
        given = {**given, "encoder_outputs": answer_of(hidden), self.argument: cache, "use_cache": True}
        answer = type(self.model).forward(self.model, **given)
        return self.fields(answer), joined([tensor for layer in layers for tensor in layer.added])

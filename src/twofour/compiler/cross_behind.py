"""The tokens of one `generate` of an encoder-decoder: steps of a graph behind its own keys and those of its encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofour.compiler.behind import GraphSteps, hooked
from twofour.compiler.cross_decoder import TAKEN, CrossDecoding
from twofour.compiler.whole_model import layers_alone
from twofour.generation.names import cache_in


def refused_crossed(model: Any, ids: Tensor, given: dict[str, Any]) -> str:
    """Return why the steps behind a start must be calls of the model, "" where they may be those of its graph.

    Args:
        model: Any.
        ids: int64 (rows, tokens), the decoder's.
        given: What transformers gives to the model's forward besides.
    """
    decoding = vars(model).get("forward")
    if not isinstance(decoding, CrossDecoding) or layers_alone(model):
        return "of layers without a graph"
    unlike = (name for name, value in given.items() if value is not None and value is not False)
    if other := [name for name in unlike if name not in (*TAKEN, decoding.argument)]:
        return f"with `{other[0]}`"
    if ids.ndim != 2 or not ids.numel() or ids.device.type != "cpu" or not given.get("use_cache"):
        return "without token ids or a cache"
    if not decoding.grow(cache_in(given)):
        return f"with caches that are not of {decoding.layers} layers that grow, or are static"
    return "of a model with forward hooks" if hooked(model) else ""


class CrossBehind(GraphSteps):
    """The tokens behind those that a decoder starts with.

    Args:
        model: Its forward is a `CrossDecoding`.
        ids: int64 (rows, tokens), the decoder's.
        given: What transformers gives to the model's forward besides.
        config: How to generate, as transformers prepared it.

    Attributes:
        first: Logits behind the start, (rows, words).
    """

    def __init__(self, model: Any, ids: Tensor, given: dict[str, Any], config: Any) -> None:
        self.both = cache_in(given)
        super().__init__(model, len(ids), self.both.self_attention_cache)
        self.given, self.moved = given, 0
        self.answer = model._prefill(ids, config, given)
        self.first = self.answer.logits[:, -1].clone()
        self.length = torch.zeros((), dtype=torch.int64, device="cpu")
        self._length = self.length.numpy()

    def _move(self) -> None:
        self.moved += 1
        if self.buffers is not None:
            self._length[()] = self.buffers.length

    def _called(self) -> Tensor:
        self.hand()
        model, self.moved, moved = self.model, 0, self.moved
        grown = {"is_encoder_decoder": True, "num_new_tokens": moved}  # masks and positions of the decoder
        self.given = model._update_model_kwargs_for_generation(self.answer, self.given, **grown)
        inputs = model.prepare_inputs_for_generation(self.ids, next_sequence_length=1, **self.given)
        self.answer = model(**inputs, return_dict=True)
        hidden, seen = self.given["encoder_outputs"][0], self.given.get("attention_mask")
        self.buffers = self.decoding.buffers_behind(self.both, hidden)
        if self.buffers is not None:
            self.read(self.decoding.leaves(self.ids, self.length, self.buffers, seen, hidden, self.both))
        return self.answer.logits[:, -1]

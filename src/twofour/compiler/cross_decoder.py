"""The forward of an encoder-decoder whose steps behind two caches run as graphs; see `decoder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twofour.compiler.cache_calls import Call
from twofour.compiler.cross_calls import CrossStep, Known, crossed
from twofour.compiler.decoder import Decoding, plain
from twofour.compiler.whole_model import WholeModel
from twofour.generation.caches import Buffers, asks_for_gradient, is_empty, is_served
from twofour.generation.names import answer_with
from twofour.generation.static_caches import Slots, is_static

TAKEN = (
    "decoder_input_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "encoder_outputs",
    "attention_mask",
    "use_cache",
    "return_dict",
)
"""Arguments of a call that the graph serves, with the cache; others must be None or False."""


class CrossDecoding(Decoding):
    """The forward of an encoder-decoder: steps behind the keys of both run as a graph, other calls as they did.

    Args:
        call: The step, as the layers make it.
        step: Its graph.
        overlooks: Whether a mask of features says nothing to a step.
    """

    def __init__(self, call: CrossStep, step: WholeModel, overlooks: bool) -> None:
        super().__init__(call.model, call.kind, call.count, step)
        self.masked, self.overlooks = call.masked, overlooks

    def _served(self, cache: Any, given: Call) -> Any:
        """Return the answer to a call that the graph holds for; else None, and why is said once."""
        own, other = caches_of(cache)
        updated = getattr(cache, "is_updated", {})
        if own is None or not all(updated.get(index) for index in range(self.layers)):
            return None  # the first call of each text
        if not all(is_served(one, self.layers) or is_static(one, self.layers) for one in (own, other)):
            return self._say(f"with caches that are not of {self.layers} layers that grow, or are static")
        unlike = (name for name, value in given.items() if value is not None and value is not False)
        if other_given := [name for name in unlike if name not in (*TAKEN, self.argument)]:
            return self._say(f"with `{other_given[0]}`")
        if given.get("use_cache") is False or given.get("return_dict") is False:
            return self._say("that asks for an answer without a cache")
        ids, encoded = given.get("decoder_input_ids"), given.get("encoder_outputs")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
            return self._say("of other than one token")
        if encoded is None or not isinstance(encoded[0], Tensor):
            return self._say("without what the encoder answered")
        if why := self.step.own():
            return self._say(why)
        if torch.is_grad_enabled() and (asks_for_gradient(own) or asks_for_gradient(other)):
            return self._say("with keys or values that a gradient is asked for")
        return self._next(cache, ids, encoded[0], given)

    def _next(self, cache: Any, ids: Tensor, hidden: Tensor, given: Call) -> Any:
        """Return the answer to one token, whose keys and values the cache has then; else None."""
        mask, seen, at = (given.get(f"{name}") for name in ("decoder_attention_mask", "attention_mask", TAKEN[2]))
        own = cache.self_attention_cache
        kind = Slots if is_static(own, self.layers) else Buffers
        length = kind.length_of(own, len(ids))
        if length is None:
            return self._say("with a cache that is full, or whose layers or sequences are not alike")
        if mask is not None and not kind.takes(mask, length):
            return self._say("with a `decoder_attention_mask` of another length than the cache and the token")
        if any(keys.shape[2] != hidden.shape[1] for keys in _encoded(cache)):
            return self._say("with keys of another length than what the encoder answered")
        if at is not None and not bool((at == length).all()):
            return self._say("with positions that are not those behind the cache")
        if not self.masked and not self.overlooks and seen is not None:
            return self._say("with an attention mask of features")
        if self.masked and seen is not None and seen.shape != hidden.shape[:2]:
            return self._say("with an attention mask that is not (batch, tokens) of the encoder")
        buffers = kind.of(own)
        buffers.see(mask)
        leaves = self.leaves(
            plain(ids), torch.tensor(length, dtype=torch.int64, device="cpu"), buffers, seen, hidden, cache
        )
        kinds = self._kinds(ids.dtype, hidden, cache)
        if buffers.checked != kinds and self.step.guard.leaves(self.step.guard.inputs.value(leaves)) is None:
            return self._say("with caches whose sizes the graph does not hold for")
        buffers.checked = kinds
        fields, added = self.step.outputs.value(self.step.program(*leaves))
        buffers.append(added, own)
        return answer_with(self.kind, {**fields, "encoder_last_hidden_state": hidden}, cache)

    def leaves(
        self, ids: Tensor, length: Tensor, buffers: Buffers | Slots, seen: Tensor | None, hidden: Tensor, cache: Any
    ) -> list[Tensor]:
        """Return what the graph is given, keys and values of both caches at last."""
        hides = [_whole_numbers(seen, hidden)] if self.masked else []
        return [ids, length, buffers.mask, *hides, hidden, *buffers.leaves, *_encoded(cache)]

    def grow(self, cache: Any) -> bool:
        """Tell whether a cache is of two whose layers the graph's steps write, or that have none yet."""
        served = (is_served, is_static)
        return all(is_empty(one) or any(kind(one, self.layers) for kind in served) for one in caches_of(cache))

    def buffers_behind(self, cache: Any, hidden: Tensor) -> Buffers | Slots | None:
        """Return the memory of a cache's keys and values that the graph holds for; None: it is to be asked."""
        own = cache.self_attention_cache
        found: Any = own.__dict__.get("_twofour_buffers")
        if found is None or found.checked != self._kinds(torch.int64, hidden, cache) or not found.are_in(own):
            return None
        return found

    def _kinds(self, ids: torch.dtype, hidden: Tensor, cache: Any) -> tuple[Any, ...]:
        """Return what the graph is asked once for with one cache."""
        return self.number, ids, hidden.dtype, hidden.shape, *(tensor.shape for tensor in _encoded(cache))

    def timed_behind(self, ids: Tensor, known: Known) -> Any:
        """Return the answer of one step behind what is known, in buffers that are kept from call to call."""
        hidden, seen, past, cross = known
        if "_timing" not in self.__dict__:
            cache = crossed(past, cross)
            self.__dict__["_timing"] = cache, Buffers.of(cache.self_attention_cache), past[0][0].shape[2]
        cache, buffers, length = self.__dict__["_timing"]
        buffers.length, buffers.mask[..., length] = length, False
        buffers.hand(cache.self_attention_cache)
        return self._next(cache, ids, hidden, {"attention_mask": seen} if self.masked else {})


def caches_of(cache: Any) -> tuple[Any, Any]:
    """Return the two caches of one, of the decoder's own keys and of its encoder's; None where it is another."""
    return getattr(cache, "self_attention_cache", None), getattr(cache, "cross_attention_cache", None)


def _encoded(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.cross_attention_cache.layers for tensor in (layer.keys, layer.values)]


def _whole_numbers(seen: Tensor | None, hidden: Tensor) -> Tensor:
    """Return which of an encoder's tokens are seen as int64 (rows, tokens)."""
    if seen is None:
        return torch.ones(hidden.shape[:2], dtype=torch.int64, device="cpu")
    return seen if seen.dtype is torch.int64 else seen.ne(0).long()

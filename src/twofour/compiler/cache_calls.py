"""The calls that `generate` makes of a decoder: a prompt with an empty cache, and one token behind its keys.

Each is known as the layers make it and as a function of tensors alone, which can be captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import native
from twofour.generation.caches import Buffers, Pair, cache_of, empty_cache, is_served, kind_of, recording_cache
from twofour.generation.names import argument_of, cache_in, name_of

UNSEEN = 30.0
"""What stands behind the keys and values of an example."""

Call = dict[str, Any]
"""What a function of tensors is given, by name."""


class RefusedError(Exception):
    """Decoding stays layer by layer for this reason."""


def pair_of(layer: Any) -> Pair:
    """Return what a layer of a cache holds."""
    return layer.keys, layer.values


def fields_of(answer: Any) -> dict[str, Any]:
    """Return what a model answers beside its cache."""
    cache = name_of(answer.keys())
    return {name: value for name, value in answer.items() if name != cache}


def positions_at(length: int, rows: int) -> Tensor:
    """Return the position of the token behind `length` others, (rows, 1)."""
    return torch.full((rows, 1), length, dtype=torch.int64, device="cpu")


def are_positions(given: Any, ids: Tensor) -> bool:
    """Tell whether an argument is the positions of tokens (batch, tokens), one row for all or one each."""
    if not isinstance(given, Tensor) or given.ndim != 2:
        return False
    return given.shape[1] == ids.shape[1] and given.shape[0] in (1, len(ids))


def joined(added: list[Tensor]) -> list[Tensor] | Tensor:
    """Return what a step adds to its cache as one tensor where all are alike, as `Buffers` holds them then."""
    return torch.stack(added) if len({kind_of(tensor) for tensor in added}) == 1 else added


def stacked(added: list[Tensor], dim: int = 0) -> Tensor:
    """Do as torch.stack, by copies that a graph makes natively: torch's asks for a tensor of each view, from Python."""
    found = added[0].new_empty(len(added), *added[0].shape)
    for tensor, place in zip(added, found.unbind(dim), strict=True):
        native.extension().copy(tensor, place, 1)
    return found


class CacheCall:
    """One kind of call with a cache, as the layers make it and as it is captured."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self.argument = argument_of(model)

    def forward(self, cache: Any, **given: Any) -> Any:
        """Return the answer of the model's own forward."""
        options = {"use_cache": True, self.argument: cache} | ({"logits_to_keep": 1} if self.keeps else {})
        return type(self.model).forward(self.model, **given, **options)


def positions_of(seen: Tensor) -> Tensor:
    """Return positions of tokens, (rows, tokens), counted from the first that is seen, as `generate` gives them."""
    return (seen.long().cumsum(-1) - 1).clamp(min=0)


class Prompt(CacheCall):
    """All tokens of a prompt with an empty cache.

    Attributes:
        masked: Whether the graph is told which tokens are seen; without that it is of prompts that hide none.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kind: Any = None
        self.count = 0
        self.masked = True

    @property
    def kept(self) -> int | None:
        """How many logits a call must ask for; None: it cannot ask."""
        return 1 if self.keeps else None

    def layers(self, ids: Tensor, seen: Tensor | None = None) -> tuple[Any, list[Pair]]:
        """Return the model's answer and the keys and values of each layer; `seen`, bool, hides padding."""
        cache = empty_cache(self.model)
        hides = {} if seen is None else {"attention_mask": seen.long(), "position_ids": positions_of(seen)}
        answer = self.forward(cache, input_ids=ids, **hides)
        kind = type(answer)
        if cache_in(answer) is not cache:
            raise RefusedError(f"the model answers a prompt with {kind.__name__}, not with the cache it was given")
        if not is_served(cache, len(cache.layers)) or not cache.layers:
            raise RefusedError("its cache has layers of other kinds than keys and values that grow")
        self.kind, self.count = kind, len(cache.layers)
        return answer, [pair_of(layer) for layer in cache.layers]

    def leaves(self, ids: Tensor, seen: Tensor | None = None) -> list[Any]:
        """Return what the graph is to answer."""
        answer, past = self.layers(ids, seen)
        return [*tree_leaves(fields_of(answer)), *tree_leaves(past)]

    def example(self, ids: Tensor, seen: Tensor | None = None) -> Call:
        """Return what the graph is given."""
        seen = torch.ones(ids.shape, dtype=torch.bool, device="cpu") if seen is None else seen
        given = {"input_ids": ids.contiguous(), "position_ids": positions_of(seen).contiguous()}
        return given | ({"attention_mask": seen.long()} if self.masked else {})

    @property
    def captured(self) -> Any:
        """What returns answer and added keys and values, for the capture."""
        return self._masked if self.masked else self._whole

    def _masked(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Any:
        return self._captured(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)

    def _whole(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self._captured(input_ids=input_ids, position_ids=position_ids)

    def _captured(self, **given: Tensor) -> Any:
        cache, layers = recording_cache([None] * self.count)
        answer = self.forward(cache, **given)
        return fields_of(answer), [layer.added for layer in layers]


class Step(CacheCall):
    """One token behind the keys of a cache."""

    def __init__(self, model: nn.Module, kind: Any, count: int) -> None:
        super().__init__(model)
        self.kind, self.count = kind, count

    def layers(self, ids: Tensor, past: Sequence[Pair]) -> Any:
        """Return the model's answer to the last of `ids` behind `past`."""
        return self.forward(cache_of(past), input_ids=ids[:, -1:])

    def leaves(self, ids: Tensor, past: Sequence[Pair]) -> list[Any]:
        """Return what the graph is to answer."""
        answer = self.layers(ids, past)
        added = [t[:, :, -1:] for layer in cache_in(answer).layers for t in pair_of(layer)]
        return [*tree_leaves(fields_of(answer)), *tree_leaves(joined(added))]

    def example(self, ids: Tensor, past: Sequence[Pair]) -> Call:
        """Return what the graph is given; keys that nobody sees are large, so that a graph that sees them shows."""
        buffers = Buffers(past)
        for tensor in buffers.leaves:
            tensor[:, :, buffers.length :] = UNSEEN
        pairs = list(zip(buffers.leaves[::2], buffers.leaves[1::2], strict=True))
        given = {"input_ids": ids[:, -1:].contiguous(), "position_ids": positions_at(buffers.length, len(ids))}
        return {**given, "attention_mask": buffers.mask, "past": pairs}

    def captured(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, past: list[Pair]) -> Any:
        """Return answer and added keys and values, for the capture; keys that the mask hides may be anything."""
        cache, layers = recording_cache(past)
        given = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        answer = self.forward(cache, **given)
        return fields_of(answer), joined([tensor for layer in layers for tensor in layer.added])

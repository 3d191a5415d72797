"""Keys and values of a Hugging Face `StaticCache`, which has room behind them of its own; see `caches`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twofour.generation.caches import Pair, capacity


def is_static(cache: Any, layers: int) -> bool:
    """Tell whether this is transformers' `StaticCache` of so many layers that count their keys, none with a window."""
    module: Any = sys.modules.get("transformers.cache_utils")
    if module is None or type(cache) is not module.StaticCache or getattr(cache, "offloading", False):
        return False
    kinds = all(type(layer) is module.StaticLayer for layer in cache.layers)
    return kinds and len(cache.layers) == layers and all(_counts(layer) for layer in cache.layers)


def _counts(layer: Any) -> bool:
    """Tell whether a layer knows how many keys it has: transformers 4 asks the caller."""
    return isinstance(getattr(layer, "cumulative_length", None), Tensor)


def is_unfilled(cache: Any) -> bool:
    """Tell whether a cache that `is_static` has no keys yet."""
    return not any(int(layer.cumulative_length) for layer in cache.layers)


def _frozen(cache: Any) -> bool:
    """Tell whether a cache was made in inference mode and is to be written outside of it, which torch refuses."""
    keys = cache.layers[0].keys
    return isinstance(keys, Tensor) and keys.is_inference() and not torch.is_inference_mode_enabled()


def fill(cache: Any, past: Sequence[Pair]) -> bool:
    """Let an unfilled cache hold keys and values; tells whether they fit in."""
    rows, length = past[0][0].shape[0], past[0][0].shape[2]
    if any(length > layer.max_cache_len for layer in cache.layers) or _frozen(cache):
        return False
    if any(layer.is_initialized and layer.keys.shape[0] != rows for layer in cache.layers):
        return False
    for layer, (keys, values) in zip(cache.layers, past, strict=True):
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys[:, :, :length] = keys
        layer.values[:, :, :length] = values
        layer.cumulative_length.fill_(length)
    return True


def hidden_of(mask: Tensor, rows: int, tokens: int) -> Tensor | None:
    """Return which tokens of a prompt are seen, bool (rows, tokens), by a mask as `generate` makes it for such a cache.

    Args:
        mask: bool (rows, 1, tokens, capacity).
        rows: Sequences.
        tokens: Of the prompt.

    Returns:
        None where the mask is another than of tokens that are hidden and of later ones.
    """
    if mask.dtype is not torch.bool or mask.shape[:3] != (rows, 1, tokens) or mask.shape[3] < tokens:
        return None
    seen = mask[:, 0, -1, :tokens]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").tril()
    alike = torch.equal(mask[..., :tokens], earlier & seen[:, None, None]) and not bool(mask[..., tokens:].any())
    return seen if alike else None


class Slots:
    """The keys and values of one static cache as a step reads them: as many of them as its program is recorded for.

    Attributes:
        length: Keys that are there.
        most: Keys that there is room for.
        mask: As in `Buffers`.
        leaves: Views of the cache's own keys and values, layer by layer.
        checked: As in `Buffers`.
    """

    def __init__(self, cache: Any) -> None:
        self.length = int(cache.layers[0].cumulative_length)
        self.most = cache.layers[0].max_cache_len
        room = min(capacity(self.length), self.most)
        self._of = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        with torch.inference_mode(False), torch.no_grad():
            self.mask = torch.zeros(self._of[0].shape[0], 1, 1, room + 1, dtype=torch.bool, device="cpu")
        self.leaves = [tensor.narrow(2, 0, room) for tensor in self._of]
        self.mask[..., : self.length] = True
        self.mask[..., room] = True
        self.checked: tuple[Any, ...] | None = None

    @classmethod
    def length_of(cls, cache: Any, rows: int) -> int | None:
        """Return how many keys a cache holds of so many sequences; None where its layers are not alike, or full."""
        if not all(layer.is_initialized for layer in cache.layers) or _frozen(cache):
            return None
        known = cache.__dict__.get("_twofour_buffers")
        if isinstance(known, cls) and known.are_in(cache):
            return known.length if known.mask.shape[0] == rows and known.length < known.most else None
        found = {(layer.keys.shape[0], layer.max_cache_len, int(layer.cumulative_length)) for layer in cache.layers}
        ((batch, most, length),) = found if len(found) == 1 else ((0, 0, 0),)
        return length if batch == rows and length < most else None

    @classmethod
    def takes(cls, mask: Tensor, length: int) -> bool:
        """Tell whether a mask says which keys one token sees: of `length` and itself, or of all room."""
        if mask.ndim == 2:
            return mask.shape[1] == length + 1
        if mask.ndim != 4 or mask.dtype is not torch.bool or mask.shape[1:3] != (1, 1) or mask.shape[3] <= length:
            return False
        return not bool(mask[..., length + 1 :].any())

    def see(self, mask: Tensor | None) -> None:
        """Let the next token see the keys of a mask that `takes` took, or all that are there."""
        if mask is None:
            self.mask[..., : self.length] = True
            self.mask[..., -1] = True
            return
        seen = mask if mask.ndim == 4 else mask[:, None, None]
        self.mask[..., : self.length] = seen[..., : self.length]
        self.mask[..., -1] = seen[..., self.length]

    @classmethod
    def of(cls, cache: Any) -> Slots:
        """Return those of a cache that has keys; it holds them from now on."""
        found = cache.__dict__.get("_twofour_buffers")
        if not isinstance(found, cls) or not found.are_in(cache) or found.length + 1 >= found.mask.shape[-1]:
            found = cls(cache)
            cache.__dict__["_twofour_buffers"] = found
        return found

    def are_in(self, cache: Any) -> bool:
        """Tell whether a cache has these tensors, and as many keys."""
        held = iter(self._of)
        same = all(layer.keys is next(held) and layer.values is next(held) for layer in cache.layers)
        return same and int(cache.layers[0].cumulative_length) == self.length

    def write(self, added: Sequence[Tensor] | Tensor, cache: Any) -> None:
        """Write keys and values of one token behind those that are there."""
        room = [tensor.narrow(2, self.length, 1) for tensor in self.leaves]
        torch._foreach_copy_(room, list(added))  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_([layer.cumulative_length for layer in cache.layers], 1)  # pyright: ignore[reportPrivateImportUsage]
        self.mask[..., self.length] = True
        self.length += 1

    append = write

    def hand(self, cache: Any) -> None:
        """Do nothing: the cache is what is written."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "checked": None}  # numbers of steps are those of a process

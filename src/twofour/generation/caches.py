"""Keys and values of a Hugging Face cache in memory with room behind them, so that a step writes and copies nothing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer, (batch, key heads, keys, width) each."""

ROOM = 64
"""A capacity is a multiple of it. A step's program is recorded once for each capacity."""

GROWTH = 1.25
"""Capacity over length when a buffer is made: a step looks at a tenth of hidden keys on average, and the keys are
copied once in a fifth of their number of steps."""


def capacity(length: int) -> int:
    """Return for how many keys memory is made where so many are there."""
    return -(-int(length * GROWTH + 1) // ROOM) * ROOM


def is_served(cache: Any, layers: int) -> bool:
    """Tell whether this is transformers' `DynamicCache` of so many layers that all grow, none with a window."""
    module: Any = sys.modules.get("transformers.cache_utils")
    if module is None or type(cache) is not module.DynamicCache or getattr(cache, "offloading", False):
        return False
    return len(cache.layers) == layers and all(type(layer) is module.DynamicLayer for layer in cache.layers)


def is_empty(cache: Any) -> bool:
    """Tell whether this is transformers' `DynamicCache` that has no layers yet."""
    module: Any = sys.modules.get("transformers.cache_utils")
    return module is not None and type(cache) is module.DynamicCache and not cache.layers


def asks_for_gradient(cache: Any) -> bool:
    """Tell whether the keys or values of a cache that has layers require a gradient."""
    held = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in held)


def initialize(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Let a layer of a cache begin with keys and values; transformers 4 asks for the keys alone."""
    asked = len(inspect.signature(type(layer).lazy_initialization).parameters) - 1
    layer.lazy_initialization(*(keys, values)[:asked])


def recording_cache(past: Sequence[Pair | None], length: Tensor | None = None) -> tuple[Any, list[Any]]:
    """Return a `DynamicCache` for one captured call behind `past`, and its layers, whose `added` is what the call adds.

    Args:
        past: Of each layer, None where there is none.
        length: Keys that the model is to count, int64 of no axes, as a static cache says it; None: all of `past`.
    """
    from transformers import cache_utils

    class Recording(cache_utils.DynamicLayer):
        """A layer that joins keys for the attention of one call and keeps what was added apart."""

        added: Pair

        def __init__(self, past: Pair | None) -> None:
            super().__init__()
            if past is not None:
                self.keys, self.values = past
                self.is_initialized = True

        def get_seq_length(self) -> Any:
            return super().get_seq_length() if length is None else length

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
            self.added = key_states, value_states
            if not self.is_initialized:
                return self.added
            assert self.keys is not None and self.values is not None
            return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)

    cache: Any = cache_utils.DynamicCache()
    cache.layers = [Recording(pair) for pair in past]
    return cache, cache.layers


def empty_cache(model: Any) -> Any:
    """Return a new cache as `generate` makes it for a model."""
    from transformers import cache_utils

    return cache_utils.DynamicCache(config=model.config)


def cache_of(past: Sequence[Pair]) -> Any:
    """Return a new `DynamicCache` that holds these very keys and values."""
    from transformers import cache_utils

    cache: Any = cache_utils.DynamicCache()
    cache.layers = [cache_utils.DynamicLayer() for _ in past]
    for layer, (keys, values) in zip(cache.layers, past, strict=True):
        initialize(layer, keys, values)
        layer.keys, layer.values = keys, values
    return cache


class Buffers:
    """The keys and values of one cache, in memory that has room behind them.

    They are written in place as long as the cache holds the very tensors that it was handed: what was cropped,
    reordered or appended to by others is copied anew.

    Args:
        past: Of each layer, of one length.

    Attributes:
        length: Keys that are there.
        mask: bool (batch, 1, 1, capacity + 1): which keys the next token sees, itself at last.
        leaves: Keys and values with all of their room, layer by layer; what is behind `length` is finite.
        checked: The number of a step, and the dtypes and sizes of what its graph was found to hold for with them.
    """

    def __init__(self, past: Sequence[Pair]) -> None:
        self.length, tensors = past[0][0].shape[2], [one for pair in past for one in pair]
        room = capacity(self.length)
        self._held: Tensor | None = None  # all keys and values where they are alike: then one call of torch serves them
        self.leaves: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            if len({kind_of(tensor) for tensor in tensors}) == 1:
                batch, heads, _, width = tensors[0].shape
                self._held = tensors[0].new_zeros(len(tensors), batch, heads, room, width)
                self.leaves = leaves_of(self._held)
            for index, tensor in enumerate(tensors):
                if self._held is None:
                    batch, heads, _, width = tensor.shape
                    self.leaves.append(tensor.new_zeros(batch, heads, room, width))
                self.leaves[index][:, :, : self.length] = tensor
            self.mask = torch.zeros(past[0][0].shape[0], 1, 1, room + 1, dtype=torch.bool, device="cpu")
        self.mask[..., : self.length] = True
        self.mask[..., room] = True
        self.checked: tuple[Any, ...] | None = None
        self._handed: list[Tensor] = []

    @classmethod
    def length_of(cls, cache: Any, rows: int) -> int | None:
        """Return how many keys a cache holds of so many sequences; None where its layers are not alike."""
        found = cache.__dict__.get("_twofour_buffers")
        if found is not None and found.are_in(cache):
            return found.length if found.mask.shape[0] == rows else None
        if not all(layer.is_initialized for layer in cache.layers):
            return None
        held = {(t.ndim, t.shape[0], t.shape[-2]) for layer in cache.layers for t in (layer.keys, layer.values)}
        ((axes, batch, length),) = held if len(held) == 1 else ((0, 0, 0),)
        return length if axes == 4 and batch == rows else None

    @classmethod
    def takes(cls, mask: Tensor, length: int) -> bool:
        """Tell whether a mask says which of `length` keys and itself one token sees."""
        return mask.ndim == 2 and mask.shape[1] == length + 1

    def see(self, mask: Tensor | None) -> None:
        """Let the next token see the keys of a mask (batch, length + 1), itself at last, or all that are there."""
        if mask is None:
            self.mask[..., : self.length] = True
            self.mask[..., -1] = True
        else:
            self.mask[:, 0, 0, : self.length] = mask[:, :-1]
            self.mask[:, 0, 0, -1] = mask[:, -1]

    @classmethod
    def of(cls, cache: Any) -> Buffers:
        """Return those of a cache that has keys; it holds them from now on."""
        found = cache.__dict__.get("_twofour_buffers")
        if found is None or not found.are_in(cache) or found.length + 1 >= found.mask.shape[-1]:
            found = cls([(layer.keys, layer.values) for layer in cache.layers])
            found.hand(cache)
        return found

    def are_in(self, cache: Any) -> bool:
        """Tell whether a cache holds the very tensors that it was handed."""
        handed = iter(self._handed)
        return all(layer.keys is next(handed) and layer.values is next(handed) for layer in cache.layers)

    def hand(self, cache: Any) -> None:
        """Let a cache hold the keys and values that are there."""
        self._handed = self._cut(0, self.length)
        handed = iter(self._handed)
        for layer in cache.layers:
            layer.keys, layer.values = next(handed), next(handed)
        cache.__dict__["_twofour_buffers"] = self

    def append(self, added: Sequence[Tensor] | Tensor, cache: Any) -> None:
        """Write keys and values of one token behind those that are there, and hand them to the cache."""
        self.write(added, cache)
        self.hand(cache)

    def write(self, added: Sequence[Tensor] | Tensor, _: Any) -> None:
        """Write keys and values of one token behind those that are there; the cache is not told."""
        if self._held is not None and isinstance(added, Tensor):
            words(self._held)[:, :, :, self.length] = words(added)[:, :, :, 0]
        else:
            torch._foreach_copy_(self._cut(self.length, 1), list(added))  # pyright: ignore[reportPrivateImportUsage]
        self.mask.numpy()[..., self.length] = True
        self.length += 1

    def _cut(self, begin: int, count: int) -> list[Tensor]:
        if self._held is not None:
            return list(self._held.narrow(3, begin, count).unbind())
        return [tensor.narrow(2, begin, count) for tensor in self.leaves]

    def __getstate__(self) -> dict[str, Any]:
        # numbers of steps are those of a process; what shares memory with `_held` is made anew
        return {**self.__dict__, "checked": None, "leaves": self.leaves if self._held is None else []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.leaves = self.leaves if self._held is None else leaves_of(self._held)


def kind_of(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Return heads, width and dtype of keys or values: what is alike in all layers of most models."""
    return tensor.shape[1], tensor.shape[3], tensor.dtype


def words(tensor: Tensor) -> np.ndarray:
    """Return the memory of a tensor as whole numbers: numpy has no bfloat16, and writes sooner than torch begins."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]).numpy()


def leaves_of(held: Tensor) -> list[Tensor]:
    """Return parts of a tensor as tensors of other storages: no graph is recorded on inputs that share one."""
    return [torch.from_dlpack(part) for part in held.unbind()]

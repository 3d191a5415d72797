"""The forward of a decoder whose calls with a cache run as graphs: which these hold for, and what they are given."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from twofour.compiler.autocast import in_own_type
from twofour.compiler.cache_calls import Call, are_positions, positions_at
from twofour.compiler.whole_model import WholeModel, layers_alone, own_signature
from twofour.errors import KernelError
from twofour.generation.caches import Buffers, Pair, asks_for_gradient, cache_of, initialize, is_empty, is_served
from twofour.generation.names import NAMES, answer_with, argument_of
from twofour.generation.static_caches import Slots, fill, hidden_of, is_static, is_unfilled

logger = logging.getLogger("twofour.compiler")

TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep")
"""Arguments of a call that the graphs serve, with the cache; others must be None or False."""


def plain(tensor: Tensor) -> Tensor:
    """Return numbers of one token a sequence with the strides of a new tensor: a run is known by them too."""
    return tensor if tensor.stride() == (1, 1) else tensor.clone(memory_format=torch.contiguous_format)


_numbers = count()


class Decoding:
    """The forward of a decoder whose calls with a cache run as graphs; other calls run as they did.

    Args:
        model: The model with compiled layers.
        kind: Class of its answers.
        layers: Layers of its cache.
        step: The graph of one token.

    Attributes:
        inner: The forward for other calls, None for that of the model's class.
        prompt: The graph of a prompt, None where the layers are as fast.
        kept: `logits_to_keep` of the calls that it holds for.
        masked: Whether it is told which tokens are seen.
        argument: The name of the cache among a call's arguments.
        number: Its own among those of this process, copies too: a cache may meet several.
    """

    def __init__(self, model: nn.Module, kind: Any, layers: int, step: WholeModel) -> None:
        self.model, self.kind, self.layers, self.step = model, kind, layers, step
        self.inner: Callable[..., Any] | None = None
        self.prompt: WholeModel | None = None
        self.kept: int | None = None
        self.masked = False
        self._said: set[str] = set()
        self.number = next(_numbers)
        self.argument = argument_of(model)
        self.__signature__ = own_signature(model)

    @property
    def __code__(self) -> CodeType:
        """Code of the model's own forward, which torch.export names its frames by."""
        return inspect.unwrap(type(self.model).forward).__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns."""
        if self.argument not in kwargs and NAMES[0] in kwargs:  # as transformers takes the older name
            kwargs[self.argument] = kwargs.pop(NAMES[0])
        cache = kwargs.get(self.argument)
        if cache is not None and not args and not layers_alone(self.model):
            try:
                answer = self._served(cache, kwargs)
            except KernelError as error:  # the layers raise it with their names, or serve the call
                answer = self._say(f"that a kernel of the graph refuses ({error.what})")
            if answer is not None:
                return answer
            return in_own_type(self.model, partial(type(self.model).forward, self.model), (), kwargs)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return in_own_type(self.model, partial(type(self.model).forward, self.model), args, kwargs)

    def _served(self, cache: Any, given: Call) -> Any:
        """Return the answer to a call that a graph holds for; else None, and why is said once."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        positions, keep = given.get("position_ids"), given.get("logits_to_keep")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            return self._say("without token ids")
        unlike = (name for name, value in given.items() if value is not None and value is not False)
        if other := [name for name in unlike if name not in (*TAKEN, self.argument)]:
            return self._say(f"with `{other[0]}`")
        if given.get("use_cache") is False or given.get("return_dict") is False:
            return self._say("that asks for an answer without a cache")
        if keep is not None and type(keep) is not int:
            return self._say("with `logits_to_keep` that is no number")
        static = is_static(cache, self.layers)
        axes = (2, 4) if static else (2,)
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim not in axes or len(mask) != len(ids)):
            return self._say("with an attention mask that is not (batch, keys)")
        if positions is not None and not are_positions(positions, ids):
            return self._say("with `position_ids` that are not (batch, tokens)")
        if mask is not None and positions is None and not bool(mask.all()):  # some models count from the mask then
            return self._say("with hidden tokens and no `position_ids`")
        if not static and not is_served(cache, self.layers):
            if not is_empty(cache):
                return self._say(f"with a {type(cache).__name__} that is not of {self.layers} layers that grow")
            return None
        if why := self.step.own():
            return self._say(why)
        if torch.is_grad_enabled() and asks_for_gradient(cache):  # no graph has one; what is copied loses it
            return self._say("with keys or values that a gradient is asked for")
        filled = cache.layers[0].is_initialized and cache.layers[0].keys.numel()
        if not filled or (static and is_unfilled(cache)):
            return self._begun(cache, ids, mask, positions, keep)
        if ids.shape[1] != 1 or keep not in (None, 0, 1):
            return self._say("of several tokens behind a cache")
        return self._stepped(cache, ids, mask, positions, Slots if static else Buffers)

    def _stepped(
        self, cache: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None, kind: type[Slots | Buffers]
    ) -> Any:
        """Return the answer to one token behind a cache, which has its keys and values then; else None."""
        length = kind.length_of(cache, len(ids))
        if length is None:
            return self._say("with a cache that is full, or whose layers or sequences are not alike")
        if mask is not None and not kind.takes(mask, length):
            return self._say("with an attention mask of another length than the cache and the token")
        buffers = kind.of(cache)
        buffers.see(mask)
        positions = positions_at(length, len(ids)) if positions is None else positions.expand(len(ids), 1)
        ids, positions = plain(ids), plain(positions)
        leaves = [ids, positions, buffers.mask, *buffers.leaves]
        kinds = self.number, ids.dtype, positions.dtype
        if buffers.checked != kinds and self.step.guard.leaves(self.step.guard.inputs.value(leaves)) is None:
            return self._say("with a cache whose sizes the graph does not hold for")
        buffers.checked = kinds
        fields, added = self.step.outputs.value(self.step.program(*leaves))
        buffers.append(added, cache)
        return answer_with(self.kind, fields, cache)

    def buffers_in(self, cache: Any) -> Buffers | Slots | None:
        """Return the memory of a cache's keys and values that this step's graph holds for; None: it is to be asked."""
        found: Any = cache.__dict__.get("_twofour_buffers")
        if found is None or found.checked != (self.number, torch.int64, torch.int64) or not found.are_in(cache):
            return None
        return found

    def _begun(self, cache: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int | None) -> Any:
        """Return the answer to a prompt with an empty cache, which has its keys and values then; else None."""
        if self.prompt is None:  # the plan says why
            return None
        seen = torch.ones(ids.shape, dtype=torch.int64, device="cpu") if mask is None else mask
        if seen.ndim == 4:
            seen = hidden_of(seen, *ids.shape)
        if seen is None or seen.shape != ids.shape or not (self.masked or bool(seen.all())):
            return self._say("of a prompt with hidden tokens")
        if self.kept is not None and (keep or 0) != self.kept:
            return self._say(f"of a prompt without logits_to_keep={self.kept}")
        if positions is None:
            positions = torch.arange(ids.shape[1], device="cpu")
        taken = {"input_ids": ids, "position_ids": positions.expand(len(ids), -1).contiguous()}
        if self.masked:
            taken["attention_mask"] = seen if seen.dtype is torch.int64 else seen.ne(0).long()
        if (leaves := self.prompt.guard.leaves(taken)) is None:
            return self._say("of a prompt whose sizes the graph does not hold for")
        fields, past = self.prompt.outputs.value(self.prompt.program(*leaves))
        if is_static(cache, self.layers):
            if not fill(cache, past):
                return self._say("of a prompt that does not fit its cache")
            return answer_with(self.kind, fields, cache)
        for layer, pair in zip(cache.layers, past, strict=True):
            initialize(layer, *pair)
        Buffers(past).hand(cache)
        return answer_with(self.kind, fields, cache)

    def timed(self, ids: Tensor, past: Sequence[Pair]) -> Any:
        """Return the answer of one step behind `past`, in buffers that are kept from call to call."""
        if "_timing" not in self.__dict__:
            cache = cache_of(past)
            self.__dict__["_timing"] = cache, Buffers.of(cache), past[0][0].shape[2]
        cache, buffers, length = self.__dict__["_timing"]
        buffers.length, buffers.mask[..., length] = length, False
        buffers.hand(cache)
        return self._stepped(cache, ids, None, None, Buffers)

    def _say(self, why: str) -> None:
        """Log, once for each reason, why a call with a cache runs layer by layer."""
        if why not in self._said:
            self._said.add(why)
            logger.warning("a call %s runs layer by layer (said once)", why)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "__signature__": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = next(_numbers)
        self.argument = argument_of(self.model)
        self.__signature__ = own_signature(self.model)

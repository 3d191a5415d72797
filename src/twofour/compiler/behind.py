"""The tokens of one `generate`: steps of a graph on memory that the cache is handed when it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from twofour.compiler.cache_calls import are_positions, positions_of
from twofour.compiler.decoder import TAKEN, Decoding
from twofour.compiler.whole_model import layers_alone
from twofour.errors import KernelError
from twofour.generation.caches import Buffers, is_empty, is_served
from twofour.generation.names import cache_in
from twofour.generation.static_caches import Slots, is_static
from twofour.graph.executor import lie_of


def refused(model: Any, ids: Tensor, given: dict[str, Any]) -> str:
    """Return why the steps behind a prompt must be calls of the model, "" where they may be those of its graph.

    Args:
        model: Any.
        ids: int64 (rows, tokens).
        given: What transformers gives to the model's forward besides.
    """
    decoding = vars(model).get("forward")
    if not isinstance(decoding, Decoding) or layers_alone(model):
        return "of layers without a graph"
    unlike = (name for name, value in given.items() if value is not None and value is not False)
    if other := [name for name in unlike if name not in (*TAKEN, decoding.argument, "cache_position")]:
        return f"with `{other[0]}`"
    if ids.ndim != 2 or not ids.numel() or ids.device.type != "cpu" or not given.get("use_cache"):
        return "without token ids or a cache"
    cache: Any = cache_in(given)
    layers = decoding.layers
    if not is_empty(cache) and not is_served(cache, layers) and not is_static(cache, layers):
        return f"with a {type(cache).__name__} that is not of {layers} layers that grow"
    if int(cache.get_seq_length()) and not hasattr(model, "_prefill"):
        return "with a cache that has keys"  # transformers 4 says no tokens behind them apart
    positions = given.get("position_ids")
    if positions is not None and not are_positions(positions[..., -ids.shape[1] :], ids):
        return "with `position_ids` that are not (batch, tokens)"
    return "of a model with forward hooks" if hooked(model) else ""


def hooked(model: nn.Module) -> bool:
    """Tell whether a call of a model runs more than its forward."""
    own = model._forward_hooks, model._forward_pre_hooks
    return any(own) or bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


class GraphSteps:
    """The tokens behind others, each a run of a step's graph; no call of the model is made for most of them.

    Args:
        model: Its forward is a `Decoding`.
        rows: Sequences.
        cache: That of the step's own keys.

    Attributes:
        ids: The token of each row, (rows, 1), which the graph reads.
        buffers: Memory of keys and values, None where a call of the model is due.
    """

    def __init__(self, model: Any, rows: int, cache: Any) -> None:
        self.model, self.decoding, self.cache = model, vars(model)["forward"], cache
        self.buffers: Buffers | Slots | None = None
        self.leaves: list[Tensor] = []
        self.lie: tuple[Any, ...] = ()
        outputs = self.decoding.step.outputs
        fields, self.added = outputs.value(list(range(outputs.spec.num_leaves)))
        self.logits = fields["logits"]
        # torch's smallest calls take 20 to 50 us each where weights have emptied the caches: numpy writes the memory
        self.ids = torch.empty(rows, 1, dtype=torch.int64, device="cpu")
        self._ids = self.ids.numpy()[:, 0]

    def next(self, tokens: np.ndarray) -> Tensor:
        """Return the logits behind one more token of each row, (rows, words).

        What is changed in the model meanwhile is seen when memory is made for more keys, or by the next call.
        """
        self._ids[:] = tokens
        self._move()
        buffers = self.buffers
        if buffers is None or buffers.length + 1 >= buffers.mask.shape[-1]:
            return self._called()
        try:
            found = self.decoding.step.program.run(self.lie, self.leaves)
        except KernelError:  # the call says which layer refuses
            return self._called()
        added = self.added
        buffers.write(found[added] if isinstance(added, int) else [found[index] for index in added], self.cache)
        return found[self.logits][:, -1]

    def hand(self) -> None:
        """Let the cache hold all keys and values."""
        if self.buffers is not None:
            self.buffers.hand(self.cache)

    def read(self, leaves: list[Tensor]) -> None:
        """Let runs of the graph read these tensors."""
        self.leaves, self.lie = leaves, lie_of(leaves)

    def _move(self) -> None:
        """Write where one more token of each row stands."""
        raise NotImplementedError

    def _called(self) -> Tensor:
        """Do as `next` by a call of the model, as transformers makes it; its graph is asked whether it serves."""
        raise NotImplementedError


class Behind(GraphSteps):
    """The tokens behind a prompt, which may stand behind keys.

    Args:
        model: Its forward is a `Decoding`.
        ids: int64 (rows, tokens).
        given: What transformers gives to the model's forward besides.
        config: How to generate, as transformers prepared it.

    Attributes:
        first: Logits behind the prompt, (rows, words).
    """

    def __init__(self, model: Any, ids: Tensor, given: dict[str, Any], config: Any) -> None:
        super().__init__(model, len(ids), cache_in(given))
        self.mask, positions, keep = (given.get(name) for name in ("attention_mask", "position_ids", "logits_to_keep"))
        if positions is None:
            positions = positions_of(torch.ones_like(ids) if self.mask is None else self.mask)
        self.options = {self.decoding.argument: self.cache, "use_cache": True, "return_dict": True}
        self.options |= {} if keep is None else {"logits_to_keep": keep}
        if int(self.cache.get_seq_length()):  # transformers finds the tokens that are not behind them yet
            answer = model._prefill(ids, config, given)
        else:
            answer = model(input_ids=ids, attention_mask=self.mask, position_ids=positions, **self.options)
        self.unseen = 0 if self.mask is None else int(self.cache.get_seq_length()) - self.mask.shape[1]
        self.first = answer.logits[:, -1].clone()  # the caller may keep it, and not those of a whole prompt with it
        self.positions = torch.empty(len(ids), 1, dtype=torch.int64, device="cpu")
        self._positions = self.positions.numpy()
        self._positions[:] = positions[:, -1:].numpy()

    def _move(self) -> None:
        self._positions += 1

    def _called(self) -> Tensor:
        self.hand()
        if self.mask is not None:
            count = int(self.cache.get_seq_length()) + 1 - self.unseen - self.mask.shape[1]
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.ids), count)], -1)
        ids, positions = self.ids.clone(), self.positions.clone()
        answer = self.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, **self.options)
        self.buffers = self.decoding.buffers_in(self.cache)
        if self.buffers is not None:
            self.read([self.ids, self.positions, self.buffers.mask, *self.buffers.leaves])
        return answer.logits[:, -1]

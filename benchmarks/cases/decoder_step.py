"""One token of a Hugging Face decoder behind a cache of fixed size, for runtimes that have no `generate()` here.

The cache is an input and the step answers with its own keys and values, which the loop writes into the cache: what each
runtime can convert, without copies of the cache on the way out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from twofour.generation.caches import recording_cache
from twofour.layers import is_hugging_face_conv1d


def with_linears(model: Any) -> Any:
    """Return a copy whose Conv1D layers of Hugging Face, which quantisers of other makes pass by, are Linears."""
    made = sharing(model)
    for name, layer in list(made.named_modules()):
        if is_hugging_face_conv1d(layer):
            linear = nn.Linear(*layer.weight.shape, bias=True)
            linear.weight.data, linear.bias.data = layer.weight.data.t().contiguous(), layer.bias.data
            owner, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(owner), leaf, linear.requires_grad_(False))
    return made


def sharing(model: Any) -> Any:
    """Return a copy of a model on the same weights and buffers: several of Llama's would not fit beside each other."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class DecoderStep(nn.Module):
    """Logits, keys and values of one token, in one row: runtimes are asked for their first answer alone.

    Args:
        decoder: The model.
        ids: The prompt, (1, tokens); its keys are there from the beginning.
        new: Tokens that are generated.

    Attributes:
        inputs: Token, position, which keys are seen, and keys and values (layers, 1, heads, room, width).
        first: The token behind the prompt.
    """

    def __init__(self, decoder: Any, ids: Tensor, new: int) -> None:
        super().__init__()
        self.decoder, self.new, self.prompt = decoder, new, ids.shape[1]
        with torch.inference_mode():
            answer = decoder(input_ids=ids, use_cache=True)
        past = [(layer.keys, layer.values) for layer in answer.past_key_values.layers]
        self.held = [torch.stack(part) for part in zip(*past, strict=True)]
        room = nn.functional.pad
        keys, values = (room(one, (0, 0, 0, new)) for one in self.held)
        self.first = answer.logits[:, -1:].argmax(-1)
        seen = torch.zeros(1, 1, 1, self.prompt + new + 1, dtype=torch.bool)
        self.inputs = self.first.clone(), torch.tensor([[self.prompt]]), seen, keys.clone(), values.clone()
        self.restart()

    def restart(self) -> None:
        """Leave the prompt alone in the cache."""
        token, position, seen, *_ = self.inputs
        token.copy_(self.first)
        position.fill_(self.prompt)
        seen.zero_()
        seen[..., : self.prompt] = True
        seen[..., -1] = True

    def forward(self, token: Tensor, position: Tensor, seen: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return logits, keys and values of the token, one behind the other."""
        cache, layers = recording_cache(list(zip(keys, values, strict=True)))
        answer = self.decoder(
            input_ids=token, position_ids=position, attention_mask=seen, past_key_values=cache, use_cache=True
        )
        added = [part.reshape(-1) for index in (0, 1) for part in (layer.added[index] for layer in layers)]
        return torch.cat([answer.logits.reshape(-1), *added])


class StepLoop:
    """Greedy decoding by a runtime that runs one step on the step's inputs, which it reads in place.

    Args:
        step: The step.
        build: One of `engines`.
        dtype: Computing type.
        threads: Threads of the runtime.
    """

    def __init__(self, step: DecoderStep, build: Callable[..., Callable[[], Any]], dtype: str, threads: int) -> None:
        self.step, self.run = step, build(SimpleNamespace(model=step, inputs=step.inputs), dtype, threads)

    def __call__(self) -> Tensor:
        """Return all tokens behind the prompt."""
        step = self.step
        step.restart()
        token, position, seen, keys, values = step.inputs
        words, found = step.decoder.config.vocab_size, [int(step.first)]
        layers, _, heads, _, width = keys.shape
        for at in range(step.prompt, step.prompt + step.new - 1):
            answer = torch.as_tensor(self.run()).reshape(-1)
            added = answer[words:].float().reshape(2, layers, 1, heads, width)
            keys[:, :, :, at], values[:, :, :, at] = added[0], added[1]
            seen[..., at] = True
            found.append(int(answer[:words].argmax()))
            token.fill_(found[-1])
            position.fill_(at + 1)
        return torch.tensor([found])

"""Two small decoders of Hugging Face with their compiled twins, made once, and which graphs a call of them runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import twofour
from twofour.compiler import decoding
from twofour.compiler.behind import Behind
from twofour.compiler.decoding import Decoding

from .small import TOKENS

IDS = torch.randint(1, 90, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are faster."""
    monkeypatch.setattr(decoding, "race", lambda calls, **_: (dict(zip(calls, (2.0, 1.0), strict=True)), 0.0))


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**sizes | options, bos_token_id=0, eos_token_id=None)).eval()


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=None, **options)).eval()


EXPORTS: dict[str, int] = {}
"""How many times torch traced a model while it was compiled."""
BESIDE: dict[str, tuple[int, int]] = {}
"""Bytes that the graphs of a model keep besides its layers, and again once they are counted, as it was compiled."""


@contextmanager
def exports_of(module: Any) -> Iterator[list[int]]:
    """Note each trace of a model inside."""
    made, export = list[int](), module.export
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "export", lambda *args, **named: made.append(1) or export(*args, **named))
        yield made


@pytest.fixture(params=["gpt2", "llama"])
def models(request: pytest.FixtureRequest, decoders: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """The masked model and the compiled one, whose graphs are made once."""
    if request.param not in decoders:
        masked = twofour.prune({"gpt2": gpt2, "llama": llama}[request.param](), "2:4")
        with exports_of(torch.export) as made:
            fast = twofour.compile(masked, {"input_ids": IDS}, tokens=TOKENS)
        decoders[request.param], EXPORTS[request.param] = (masked, fast), len(made)
        BESIDE[request.param] = beside(fast)  # calls of tests make further layouts
    return decoders[request.param]


def beside(fast: Any) -> tuple[int, int]:
    held = fast.__dict__.pop("forward")
    if held.inner is not None:
        object.__setattr__(fast, "forward", held.inner)
    try:
        added = decoding.bytes_beside(fast, held)
    finally:
        object.__setattr__(fast, "forward", held)
    return added, decoding.bytes_beside(fast, held)


def generated(model: Any, ids: Tensor, new: int = 12, **options: Any) -> Any:
    options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, max_new_tokens=new, **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of its graphs a model runs."""
    seen: list[str] = []
    for name in ("_stepped", "_begun"):
        own = getattr(Decoding, name)

        def counted(self: Decoding, *args: Any, name: str = name, own: Any = own) -> Any:
            answer = own(self, *args)
            seen.append(name if answer is not None else f"{name} by layers")
            return answer

        monkeypatch.setattr(Decoding, name, counted)
    following, asking, asked = Behind.next, Behind._called, list[Behind]()

    def followed(self: Behind, tokens: Any) -> Tensor:
        before, answer = len(asked), following(self, tokens)
        seen.extend(["_stepped"] if len(asked) == before else [])  # the graph without a call of the model
        return answer

    monkeypatch.setattr(Behind, "_called", lambda self: (asked.append(self), asking(self))[1])
    monkeypatch.setattr(Behind, "next", followed)
    return seen


PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[1, :4] = 0


def behind(model: Any, mode: Any) -> Any:
    """A cache that has the keys of `IDS`, made in this mode."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with mode():
        model(input_ids=IDS, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache

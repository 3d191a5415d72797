"""`generate` with a static cache as graphs: written in place, the layers' tokens, and what is left to the layers."""

import copy
from typing import Any

import pytest
import torch

import twofour
from tests.compiler.decoders import (  # noqa: F401  fixtures
    IDS,
    PADDED,
    calls,
    generated,
    graphs,
    models,
)
from twofour.generation.caches import ROOM

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")

STATIC = {"cache_implementation": "static"}


def static(model: Any, most: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=most)


def test_a_static_cache_is_written_in_place(models: tuple[Any, Any], calls: list[str]) -> None:  # noqa: F811
    masked, fast = models
    assert torch.equal(generated(fast, IDS, **STATIC), generated(masked, IDS, **STATIC))
    assert calls == ["_begun", *["_stepped"] * 11]


@pytest.mark.long
def test_qwen2_runs_on_graphs_with_both_caches(calls: list[str]) -> None:  # noqa: F811
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    masked = twofour.prune(
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, bos_token_id=0, eos_token_id=None)).eval(), "2:4"
    )
    fast: Any = twofour.compile(masked, {"input_ids": IDS}, tokens=TOKENS)
    ids = torch.cat([IDS, IDS.flip(1)])
    for options in ({}, STATIC, {"attention_mask": PADDED}, {"attention_mask": PADDED, **STATIC}):
        calls.clear()
        assert torch.equal(generated(fast, ids, **options), generated(masked, ids, **options)), options
        assert calls == ["_begun", *["_stepped"] * 11], options


def test_a_static_cache_answers_as_the_model_and_counts(models: tuple[Any, Any]) -> None:  # noqa: F811
    answers = []
    for model in models:
        cache, found = static(model, 200), []
        with torch.no_grad():
            for ids in (IDS, *([IDS[:, :1], IDS[:, 1:2]] * (ROOM // 2 + 2))):
                found.append(model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)
            copied = copy.deepcopy(cache)
            for one in (cache, copied):  # what one is given the other does not see
                found.append(model(input_ids=IDS[:, 2:3], past_key_values=one, use_cache=True).logits)
            several = model(input_ids=IDS[:, :3], past_key_values=cache, use_cache=True).logits
            found.append(several[:, -1:])
            found.append(model(input_ids=IDS[:, 3:4], past_key_values=cache, use_cache=True).logits)
            cache.reset()
            found.append(model(input_ids=IDS[:, :5], past_key_values=cache, use_cache=True, logits_to_keep=1).logits)
            found.append(model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True).logits)
        assert int(cache.get_seq_length()) == 6 and cache.layers[1].keys.shape[2] == 200
        answers.append((torch.cat(found), cache))
    (want, held), (got, cache) = answers
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for layer, other in zip(held.layers, cache.layers, strict=True):
        torch.testing.assert_close(other.keys[:, :, :6], layer.keys[:, :, :6], atol=1e-5, rtol=1e-4)
        assert not other.values[:, :, 6:].any()


def test_a_full_static_cache_is_refused_as_by_the_model(models: tuple[Any, Any], calls: list[str]) -> None:  # noqa: F811
    for model in models:
        cache = static(model, 10)
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache, use_cache=True, logits_to_keep=1)
            model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
            with pytest.raises(IndexError):
                model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
            with pytest.raises(IndexError):
                model(input_ids=IDS, past_key_values=static(model, 8), use_cache=True, logits_to_keep=1)
    assert calls == ["_begun", "_stepped", "_stepped by layers", "_begun by layers"]


def test_other_masks_of_a_static_cache_are_left_to_the_layers(models: tuple[Any, Any], calls: list[str]) -> None:  # noqa: F811
    mask = torch.zeros(1, 1, 1, 32, dtype=torch.bool)
    mask[..., 2:10] = True
    beyond = mask.clone()
    beyond[..., 20] = True
    at, answers = torch.tensor([[9]]), []
    for model in models:
        cache, found = static(model, 32), []
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for one in (mask, beyond):
                again = copy.deepcopy(cache)
                given = {"attention_mask": one, "position_ids": at, "past_key_values": again}
                found.append(model(input_ids=IDS[:, :1], **given).logits)
        answers.append(torch.cat(found))
    torch.testing.assert_close(answers[1], answers[0], atol=1e-4, rtol=1e-4)
    assert calls == ["_begun", "_stepped", "_stepped by layers"]

"""Static caches of encoder-decoders: steps of the graph write them in place, and give the tokens of the layers."""

import copy
import logging
from typing import Any

import pytest
import torch

from tests.compiler.decoders import graphs  # noqa: F401  a fixture
from tests.compiler.test_cross_decoding import IDS, compiled, let_go, models, steps, t5, whisper  # noqa: F401  fixtures
from tests.compiler.test_cross_generation import SEEN, both
from tests.compiler.test_generation import SAMPLED
from twofour.generation.caches import ROOM

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")

STATIC = {"cache_implementation": "static"}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 200,
    "decoder_start_token_id": 2,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "pad_token_id": 1,
}


def bart() -> tuple[Any, dict[str, Any]]:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    return _wide(BartForConditionalGeneration(BartConfig(**SIZES, bos_token_id=0)))


def marian() -> tuple[Any, dict[str, Any]]:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    return _wide(MarianMTModel(MarianConfig(**SIZES)))


def _wide(model: Any) -> tuple[Any, dict[str, Any]]:
    """A model whose tokens differ from each other, and its example."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 64))  # the embedding's would say the token it is given
    for name, weight in model.named_parameters():
        weight.data *= 4 if weight.ndim > 1 and "embed" not in name else 1
    return model.eval(), {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}


def static(model: Any, given: dict[str, Any], most: int, beyond: int = 0) -> tuple[Any, Any]:
    """What the encoder answers, and a cache with room for so many tokens."""
    from transformers import EncoderDecoderCache, StaticCache

    with torch.no_grad():
        encoded = model.get_encoder()(**given)
    rooms = most, encoded[0].shape[1] + beyond
    return encoded, EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=room) for room in rooms))


@pytest.mark.parametrize("make", [t5, *(pytest.param(one, marks=pytest.mark.long) for one in (bart, marian))])
def test_tokens_are_those_of_the_layers(make: Any, steps: list[bool]) -> None:  # noqa: F811
    masked, fast, _ = compiled(make)
    options: dict[str, Any]
    for options in ({}, SAMPLED, {"attention_mask": SEEN}, {"decoder_input_ids": IDS[:, :4]}, {"num_beams": 2}):
        steps.clear()
        ours, theirs = both(fast, IDS, **STATIC, **options)
        assert torch.equal(ours, theirs) and len(ours.unique()) > 2, options
        assert all(steps) and len(steps) >= 10, options
        if options is not SAMPLED:
            want = masked.generate(IDS, max_new_tokens=10, do_sample=False, **STATIC, **options)
            assert torch.equal(ours, want), options


@pytest.mark.long
def test_whispers_own_generate_takes_a_static_cache(steps: list[bool]) -> None:  # noqa: F811
    masked, fast, given = compiled(whisper)
    fast.generation_config.no_timestamps_token_id = masked.generation_config.no_timestamps_token_id = 60
    ours, theirs = both(fast, given["input_features"], 8, **STATIC)
    assert torch.equal(ours, theirs) and all(steps) and steps
    want = masked.generate(given["input_features"], max_new_tokens=8, do_sample=False, **STATIC)
    assert torch.equal(ours, want)


def test_a_static_cache_is_written_in_place_and_counts(models: Any, steps: list[bool]) -> None:  # noqa: F811
    answers = []
    for model in models[:2]:
        (encoded, cache), found = static(model, models[2], 100), []
        with torch.no_grad():
            ids = IDS[:, :1]
            for _ in range(min(ROOM + 4, 60 if "input_features" in models[2] else ROOM + 4)):
                call = {"decoder_input_ids": ids, "encoder_outputs": encoded, "past_key_values": cache}
                found.append(model(**call, use_cache=True).logits)
                ids = found[-1][:, -1:].argmax(-1)
            for one in (copied := copy.deepcopy(cache), cache):  # what one is given the other does not see
                found.append(model(**call | {"past_key_values": one}, use_cache=True).logits)
        held = cache.self_attention_cache
        assert int(copied.get_seq_length()) == int(cache.get_seq_length()) == len(found) - 1
        assert held.layers[1].keys.shape[2] == 100 and not held.layers[1].keys[:, :, len(found) - 1 :].any()
        answers.append((torch.cat(found), held))
    (want, layers), (got, cache) = answers
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
    assert all(steps) and len(steps) == len(found) - 1
    for layer, other in zip(layers.layers, cache.layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(other.values, layer.values, atol=1e-4, rtol=1e-3)


def test_what_steps_do_not_serve_is_left_to_the_layers(
    models: Any,  # noqa: F811
    steps: list[bool],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    masked, fast, given = models
    fast.__dict__["forward"]._said.clear()
    for most, beyond, calls in ((2, 0, 2), (8, 5, 3)):
        answers = []
        for model in (masked, fast):
            (encoded, cache), found = static(model, given, most, beyond), []
            call = {"decoder_input_ids": IDS[:, :1], "encoder_outputs": encoded, "past_key_values": cache}
            with torch.no_grad(), caplog.at_level(logging.WARNING, "twofour"):
                found += [model(**call, use_cache=True).logits for _ in range(calls)]
                if most == 2:
                    with pytest.raises(IndexError):
                        model(**call, use_cache=True)
            answers.append(torch.cat(found))
        torch.testing.assert_close(answers[1], answers[0], atol=2e-4, rtol=1e-3)
    assert steps == [True, False, False, False]
    assert "with a cache that is full" in caplog.text and "of another length than what the encoder" in caplog.text

"""`generate` of encoder-decoders in a loop of its own: the tokens of transformers' loop, and what is left to that."""

import copy
import inspect
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import twofour
from tests.compiler.decoders import graphs  # noqa: F401  a fixture
from tests.compiler.test_cross_decoding import IDS, compiled, let_go, steps, t5, whisper  # noqa: F401  fixtures
from tests.compiler.test_generation import (
    SAMPLED,
    Streamer,
    interrupted,
    said_once,
    same_cache,
    transformers_loop,
    without_capturing,
)
from twofour.compiler.cache_calls import RefusedError
from twofour.compiler.cross_calls import CrossStep
from twofour.generation import Generation

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")

SEEN = torch.ones(2, 9, dtype=torch.int64)
SEEN[1, 6:] = 0


@pytest.fixture
def fast() -> Any:
    return compiled(t5)[1]


def both(fast: Any, given: Tensor, new: int = 10, **options: Any) -> tuple[Any, Any]:
    """What this loop and transformers' generate."""
    assert isinstance(fast.__dict__["generate"], Generation)
    options = {"max_new_tokens": new, "do_sample": False} | options
    torch.manual_seed(1)
    ours = fast.generate(given, **options)
    torch.manual_seed(1)
    with transformers_loop(fast):
        return ours, fast.generate(given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SAMPLED,
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"forced_bos_token_id": 5, "forced_eos_token_id": 7},
        {"decoder_input_ids": IDS[:, :4]},
        {"decoder_input_ids": IDS[:, :4], "decoder_attention_mask": torch.ones(2, 4, dtype=torch.int64).tril(2)},
        {"max_new_tokens": None, "max_length": 9},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_tokens_are_those_of_transformers_loop(fast: Any, steps: list[bool], options: dict[str, Any]) -> None:  # noqa: F811
    for mask in (None, SEEN):
        steps.clear()
        ours, theirs = both(fast, IDS, attention_mask=mask, **options)
        assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype
        assert len(ours.unique()) > 2, "the tokens differ from each other"
        began = 5 if "decoder_input_ids" in options else 1
        assert steps == [True] * (1 + ours.shape[1] - began - 1), "one call of the model here, in that loop all"


def test_room_that_grows_and_batches_of_other_sizes(fast: Any) -> None:
    for rows, new in ((1, 80), (2, 70), (1, 6), (2, 70)):
        ours, theirs = both(fast, IDS[:rows], new, attention_mask=SEEN[:rows])
        assert torch.equal(ours, theirs) and ours.shape == (rows, new + 1)


@pytest.mark.parametrize("least", [None, 4])
def test_rows_end_where_their_words_do(fast: Any, least: int | None) -> None:
    plain = both(fast, IDS, 10)[0]
    for words in (int(plain[0, 3]), plain[:, 5].tolist()):
        ours, theirs = both(fast, IDS, 12, eos_token_id=words, pad_token_id=95, min_new_tokens=least)
        assert torch.equal(ours, theirs), words
    assert least or ours.shape[1] < 13 or (ours == 95).any(), "a row has ended before the other"


def test_a_streamer_is_given_each_token(fast: Any) -> None:
    ours, theirs = Streamer(), Streamer()
    tokens = fast.generate(IDS[:1], max_new_tokens=5, streamer=ours)
    with transformers_loop(fast):
        fast.generate(IDS[:1], max_new_tokens=5, streamer=theirs)
    assert ours.seen == theirs.seen and ours.seen[-1] == []
    assert [one for seen in ours.seen for one in seen] == tokens[0].tolist()


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_scores_logits_and_caches_are_those_of_transformers_loop(fast: Any, options: dict[str, Any]) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    ours, theirs = both(fast, IDS, 6, attention_mask=SEEN, **asked, **options)
    assert type(ours) is type(theirs) and ours.keys() == theirs.keys() and len(ours.scores) == 6
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.scores + ours.logits, theirs.scores + theirs.logits, strict=True):
        assert torch.equal(one, other)
    for name in ("self_attention_cache", "cross_attention_cache"):
        same_cache(getattr(ours.past_key_values, name), getattr(theirs.past_key_values, name))


def test_a_cache_of_the_caller_is_whole_after_every_step(fast: Any) -> None:
    from transformers import DynamicCache, EncoderDecoderCache

    cache, lengths = EncoderDecoderCache(DynamicCache(), DynamicCache()), list[int]()

    def looks(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        lengths.append(cache.get_seq_length())
        return torch.zeros(len(ids), dtype=torch.bool) if len(lengths) < 5 else interrupted()  # type: ignore[return-value]

    with pytest.raises(KeyboardInterrupt):
        fast.generate(IDS, max_new_tokens=8, past_key_values=cache, stopping_criteria=[looks])
    assert lengths == [1, 2, 3, 4, 5] and cache.get_seq_length() == 5


def test_callers_in_threads_do_not_meet(fast: Any) -> None:
    asked = [(IDS[:1], 12), (IDS, 9), (IDS[1:, :5], 30), (IDS.flip(1), 12)] * 2
    want = [fast.generate(ids, max_new_tokens=new) for ids, new in asked]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda one: fast.generate(one[0], max_new_tokens=one[1]), asked))
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "by beam search"),
        ({"use_cache": False}, "without token ids or a cache"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "with `output_hidden_states`"),
    ],
)
def test_what_the_loop_does_not_do_is_transformers_own_and_said_once(
    fast: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any], why: str
) -> None:
    said_once(fast, caplog, why, lambda: both(fast, IDS, 5, **options))


def test_signature_copies_and_pickles(fast: Any) -> None:
    assert "streamer" in inspect.signature(fast.generate).parameters
    want = fast.generate(IDS, max_new_tokens=4)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(without_capturing(copy.deepcopy(fast))))):
        assert again.generate.model is again
        assert torch.equal(again.generate(IDS, max_new_tokens=4), want)


@pytest.mark.long
def test_whispers_own_generate_gives_the_tokens_of_transformers_loop(
    steps: list[bool],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    fast = compiled(whisper)[1]
    fast.generation_config.no_timestamps_token_id, fast.generation_config.max_initial_timestamp_index = 60, 5
    sound, long = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0)), torch.ones(2, 100).long()
    hides = {"suppress_tokens": [3, 5, 200], "begin_suppress_tokens": [26]}
    whole = {"return_dict_in_generate": True, "output_logits": True}
    segments = {"return_timestamps": True, "attention_mask": long, "condition_on_prev_tokens": True}
    falls = {"temperature": (0.0, 0.5), "logprob_threshold": -0.1, "compression_ratio_threshold": 1.2}
    with caplog.at_level(logging.INFO, "twofour"):
        for options in ({}, hides, {"temperature": 0.9}, whole, segments, {**segments, **falls}):
            given = sound.repeat(1, 1, 3)[..., :100] if "attention_mask" in options else sound
            steps.clear()
            ours, theirs = both(fast, given, 8, **options)
            assert torch.equal(*(getattr(one, "sequences", one) for one in (ours, theirs))), options
            assert all(steps) and steps, options
        with transformers_loop(fast):
            want = fast.generate(input_features=sound, max_new_tokens=4)
        assert torch.equal(fast.generate(input_features=sound, max_new_tokens=4), want)
    assert not [record for record in caplog.records if "said once" in record.message]


ADAPTER: dict[str, Any] = {"add_adapter": True, "num_adapter_layers": 3, "adapter_stride": 2, "output_hidden_size": 64}
SOUNDS = torch.randn(2, 600, generator=torch.Generator().manual_seed(0))
HEARD = torch.ones(2, 600, dtype=torch.int64)
HEARD[1, 120:] = 0


def hears(decoder: Any, **adapter: Any) -> Any:
    from transformers import SpeechEncoderDecoderModel, Wav2Vec2Config, Wav2Vec2Model

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    convolutions: dict[str, Any] = {
        "conv_dim": [16] * 3,
        "conv_kernel": [2] * 3,
        "conv_stride": [2] * 3,
        "num_feat_extract_layers": 3,
    }
    places: dict[str, Any] = {
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "feat_extract_norm": "layer",
    }
    encoder = Wav2Vec2Model(Wav2Vec2Config(**sizes, **convolutions, **places, mask_time_prob=0, **adapter))
    model: Any = SpeechEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    for name, weight in model.named_parameters():
        weight.data *= 8 if name.startswith("decoder") and weight.ndim > 1 else 1
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, None
    return model


def mbart(encoder_layers: int) -> Any:
    from transformers import MBartConfig, MBartForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
    }
    return MBartForCausalLM(MBartConfig(**sizes, encoder_layers=encoder_layers, max_position_embeddings=128))


@pytest.mark.parametrize("adapter", [ADAPTER, {}], ids=["adapter", "plain"])
def test_a_mask_of_sounds_is_said_to_be_read(adapter: dict[str, Any]) -> None:
    model, example = hears(mbart(2), **adapter), {"input_values": SOUNDS, "decoder_input_ids": IDS[:, :3]}
    step, ids = CrossStep(model), IDS[:, :1]
    with torch.no_grad():
        assert not step.overlooks(ids, step.begin(example))


def test_whispers_mask_is_said_to_be_overlooked() -> None:
    model, example = whisper()
    step = CrossStep(model)
    with torch.no_grad():
        assert step.overlooks(IDS[:, :1], step.begin(example))


@pytest.mark.long
@pytest.mark.parametrize("adapter", [ADAPTER, {}], ids=["adapter", "plain"])
def test_tokens_behind_a_mask_of_sounds_are_those_of_the_layers(adapter: dict[str, Any]) -> None:
    masked: Any = twofour.prune(hears(mbart(2), **adapter), "2:4", criterion="magnitude", skip="encoder.*")
    fast: Any = twofour.compile(masked, {"input_values": SOUNDS, "decoder_input_ids": IDS[:, :3]}, tokens=TOKENS)
    assert "generate" in fast.__dict__, fast.plan.notes
    found = []
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    for mask in ({}, {"attention_mask": HEARD}):
        want, got = (one.generate(SOUNDS, **options, **mask) for one in (masked, fast))
        assert torch.equal(got.sequences, want.sequences), mask
        torch.testing.assert_close(got.logits, want.logits, atol=2e-4, rtol=1e-3)
        found.append(torch.stack(want.logits))
    assert (found[0] - found[1]).abs().max() > 0.01


def test_a_cache_with_layers_that_no_decoder_fills_is_said_plainly() -> None:
    with torch.no_grad(), pytest.raises(RefusedError, match="its cache has 3 layers, of which its decoder fills 2: "):
        CrossStep(hears(mbart(3))).begin({"input_values": SOUNDS, "decoder_input_ids": IDS[:, :3]})

"""Encoder-decoders: steps behind two caches as a graph, the layers' answers, what the layers keep."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import twofour
from tests.compiler.decoders import exports_of, graphs  # noqa: F401  a fixture
from twofour.compiler.cross_decoder import CrossDecoding

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")

IDS = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def t5() -> tuple[Any, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    ends = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ends))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 64))  # the embedding's would say the token it is given
    for name, weight in model.named_parameters():
        weight.data *= 8 if name.endswith("o.weight") else 1
    return model.eval(), {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}


def whisper() -> tuple[Any, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "num_mel_bins": 8, "vocab_size": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 128}
    more = {"max_source_positions": 20, "max_target_positions": 64, "decoder_start_token_id": 1}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **more, **ends))
    return model.eval(), {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": IDS[:, :3]}


_compiled: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
_exports: dict[str, int] = {}
"""How many times torch traced a model while it was compiled."""


@pytest.fixture(autouse=True, scope="session")
def let_go() -> Iterator[None]:
    """No module holds compiled models to the end of the process: see `decoders` of conftest.py."""
    yield
    _compiled.clear()
    _exports.clear()


def compiled(make: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The masked model, the compiled one, whose graph is made once, and what is given to the encoder."""
    if make.__name__ not in _compiled:
        model, example = make()
        masked = twofour.prune(model, "2:4")
        with exports_of(torch.export) as made:
            fast = twofour.compile(masked, example, tokens=TOKENS)
        _exports[make.__name__] = len(made)
        _compiled[make.__name__] = masked, fast, {k: v for k, v in example.items() if k[:7] != "decoder"}
    return _compiled[make.__name__]


@pytest.fixture(params=[t5, pytest.param(whisper, marks=pytest.mark.long)])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any, dict[str, Any]]:
    return compiled(request.param)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step, whether the graph ran it."""
    seen: list[bool] = []
    own = CrossDecoding._next

    def counted(self: CrossDecoding, *args: Any) -> Any:
        answer = own(self, *args)
        seen.append(answer is not None)
        return answer

    monkeypatch.setattr(CrossDecoding, "_next", counted)
    return seen


def continued(model: Any, given: dict[str, Any], new: int, **more: Any) -> tuple[list[torch.Tensor], Any]:
    """Logits of a start and of tokens behind it, as `generate` asks for them, and the cache."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache, found = EncoderDecoderCache(DynamicCache(), DynamicCache()), []
    with torch.no_grad():
        encoded = model.get_encoder()(**given, **{k: v for k, v in more.items() if k == "attention_mask"})
        token = torch.tensor([[1], [2]])
        for _ in range(new):
            call = {"decoder_input_ids": token, "encoder_outputs": encoded, "past_key_values": cache, **more}
            found.append(model(**call, use_cache=True).logits)
            token = found[-1][:, -1:].argmax(-1)
    return found, cache


def test_steps_run_on_a_graph_and_answer_as_the_layers(models: Any, steps: list[bool]) -> None:
    masked, fast, given = models
    assert isinstance(fast.__dict__["forward"], CrossDecoding), fast.plan.notes
    (want, held), (got, cache) = (continued(model, given, 40) for model in (masked, fast))
    assert steps == [True] * 39
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)
    for layer, other in zip(held.self_attention_cache.layers, cache.self_attention_cache.layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, atol=1e-4, rtol=1e-3)


def test_a_compile_traces_a_step_alone(models: Any) -> None:
    assert _exports == dict.fromkeys(_compiled, 1)


def test_copies_and_other_orders_of_a_cache(models: Any, steps: list[bool]) -> None:
    masked, fast, given = models
    answers = []
    for model in (masked, fast):
        _, cache = continued(model, given, 4)
        with torch.no_grad():
            encoded, found = model.get_encoder()(**given), []
            cache.reorder_cache(torch.tensor([1, 0]))
            for one in (copy.deepcopy(cache), cache):
                call = {"decoder_input_ids": IDS[:, :1], "encoder_outputs": encoded, "past_key_values": one}
                found += [model(**call, use_cache=True).logits for _ in range(2)]
        answers.append(torch.stack(found))
    torch.testing.assert_close(answers[1], answers[0], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(answers[1][:2], answers[1][2:])
    assert all(steps) and len(steps) == 7


def test_what_the_graph_does_not_serve_is_said(
    models: Any, caplog: pytest.LogCaptureFixture, steps: list[bool]
) -> None:
    masked, fast, given = models
    fast.__dict__["forward"]._said.clear()
    with caplog.at_level(logging.WARNING, "twofour"):
        (want, _), (got, _) = (continued(model, given, 3, output_attentions=False) for model in (masked, fast))
        (want_too, _), (got_too, _) = (
            continued(model, given, 3, output_hidden_states=True) for model in (masked, fast)
        )
    torch.testing.assert_close(got + got_too, want + want_too, atol=2e-4, rtol=1e-3)
    assert steps == [True, True]
    assert [record.message for record in caplog.records] == [
        "a call with `output_hidden_states` runs layer by layer (said once)"
    ]


@pytest.mark.parametrize("make", [t5, whisper])
def test_an_example_without_input_of_the_decoder_is_told_what_is_missing(make: Any) -> None:
    """It was told to check its sizes."""
    model, example = make()
    with pytest.raises(twofour.errors.CompileError, match="gives the encoder alone its input") as refused:
        twofour.compile(model, alone := {k: v for k, v in example.items() if k[:7] != "decoder"}, tokens=TOKENS)
    with torch.no_grad():  # as it is told
        model(**alone, decoder_input_ids=torch.full((2, 1), model.config.decoder_start_token_id))
    name, start = next(iter(example)), model.config.decoder_start_token_id
    advice = f'example={{"{name}": ..., "decoder_input_ids": torch.full((2, 1), {start})}}'
    for part in (f"an example of '{name}'", "`decoder_input_ids` too", advice):
        assert part in str(refused.value)


def test_a_fault_of_another_argument_is_not_put_on_the_decoder() -> None:
    """BART makes its decoder's input of `input_ids`; ids out of range were told to give the decoder some."""
    from transformers import BartConfig, BartModel

    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(**sizes, **heads, vocab_size=64, max_position_embeddings=32)).eval()
    with pytest.raises(twofour.errors.CompileError, match="index out of range") as refused:
        twofour.compile(model, {"input_ids": torch.full((1, 8), 99)}, graph=False)
    assert "decoder" not in str(refused.value) and "check its sizes" in str(refused.value)


def test_a_loaded_model_says_what_brings_its_graphs(tmp_path: Path) -> None:
    """It decoded layer by layer and had no line on that."""
    masked, fast, given = compiled(t5)
    twofour.save(fast, tmp_path / "m")
    notes = twofour.load(tmp_path / "m", masked).plan.notes
    (said,) = (note for note in notes if note.startswith("decoding runs layer by layer"))
    assert "load(..., example=...) with `decoder_input_ids` captures them" in said
    notes = twofour.load(tmp_path / "m", masked, example={**given, "decoder_input_ids": IDS[:, :3]}).plan.notes
    assert any(note.startswith("decoding (") for note in notes) and any(note.startswith("generate()") for note in notes)
    slow = copy.deepcopy(masked)
    slow.config._attn_implementation = "eager"
    assert any('its attention is "eager"' in note for note in twofour.load(tmp_path / "m", slow).plan.notes)

"""`generate` of Hugging Face's decoders: prompts and steps as graphs, the cache written in place, eager's tokens."""

# ruff: noqa: F811  the fixtures of tests/compiler/decoders.py

import copy
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import twofour
from tests.compiler.decoders import (
    BESIDE,
    EXPORTS,
    IDS,
    PADDED,
    behind,
    calls,  # noqa: F401  a fixture
    generated,
    gpt2,
    graphs,  # noqa: F401  a fixture
    llama,
    models,  # noqa: F401  a fixture
)
from twofour.compiler import decoding
from twofour.compiler.cache_calls import RefusedError
from twofour.compiler.decoding import Decoding
from twofour.generation.caches import ROOM

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")


def test_generate_runs_on_graphs_and_gives_the_same_tokens(models: tuple[Any, Any], calls: list[str]) -> None:
    masked, fast = models
    assert isinstance(fast.__dict__["forward"], Decoding)
    assert any(note.startswith("decoding (1 x 9 tokens in the cache): a step 1000.000 ms") for note in fast.plan.notes)
    assert torch.equal(generated(fast, IDS), generated(masked, IDS))
    assert calls == ["_begun", *["_stepped"] * 11]


def test_a_compile_traces_a_step_and_a_prompt(models: tuple[Any, Any], request: pytest.FixtureRequest) -> None:
    """A trace takes as long as all else together; five more found that the model answers with a cache."""
    assert EXPORTS[request.node.callspec.params["models"]] == 2
    assert "it answers with a cache, which no graph holds" in models[1].plan.account.reason


def test_the_plan_says_what_the_graphs_keep_besides_the_model(
    models: tuple[Any, Any], request: pytest.FixtureRequest
) -> None:
    added, counted = BESIDE[request.node.callspec.params["models"]]
    said = next(note for note in models[1].plan.notes if note.startswith("decoding"))
    assert (f"its graphs keep {added / 1e6:.2f} MB of weights besides" in said) is bool(added), said
    assert counted == 0


@pytest.mark.long
def test_a_layer_that_went_back_to_dense_leaves_decoding_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = twofour.prune(gpt2(), "2:4")

    def one_dense(fast: Any, plan: Any, *_: object) -> Any:
        name = "transformer.h.0.mlp.c_fc"
        fast.get_submodule("transformer.h.0.mlp").c_fc = copy.deepcopy(masked.get_submodule(name))
        fast.__dict__.pop("forward", None)
        return replace(plan, kept_dense=(name,))

    monkeypatch.setattr(sys.modules["twofour.compiler.compile"], "never_slower", one_dense)
    fast: Any = twofour.compile(masked, {"input_ids": IDS}, tokens=TOKENS)
    assert fast.plan.kept_dense and isinstance(fast.__dict__["forward"], Decoding)
    assert torch.equal(generated(fast, IDS), generated(masked, IDS))


def test_other_batches_and_lengths_are_served(models: tuple[Any, Any], calls: list[str]) -> None:
    masked, fast = models
    for batch, length, new in ((3, 5, 4), (1, 30, ROOM + 8)):
        ids = torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(batch))
        assert torch.equal(generated(fast, ids, new), generated(masked, ids, new))
    assert set(calls) == {"_begun", "_stepped"}


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_padded_prompts_run_on_graphs(models: tuple[Any, Any], calls: list[str], options: dict[str, Any]) -> None:
    masked, fast = models
    ids = torch.cat([IDS, IDS.flip(1)])
    want, got = (generated(model, ids, attention_mask=PADDED, **options) for model in (masked, fast))
    assert torch.equal(got, want) and calls == ["_begun", *["_stepped"] * 11]


@pytest.mark.parametrize("mask", [PADDED.bool(), PADDED.float(), PADDED.flip(1)])
def test_a_padded_prompt_answers_as_the_model(models: tuple[Any, Any], calls: list[str], mask: Tensor) -> None:
    from transformers import DynamicCache

    ids, answers = torch.cat([IDS, IDS.flip(1)]), []
    positions = (mask.cumsum(-1) - 1).clamp(min=0).long()
    for model in models:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "logits_to_keep": 1}
            answers.append((model(input_ids=ids, **given).logits, cache))
    assert calls == ["_begun"]
    (want, held), (got, cache) = answers
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for layer, other in zip(held.layers, cache.layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, atol=1e-5, rtol=1e-4)


def test_steps_answer_as_the_model_and_leave_its_cache(models: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    answers = []
    for model in models:
        cache, found = DynamicCache(config=model.config), []
        with torch.no_grad():
            for ids in (IDS, IDS[:, :1], IDS[:, 1:2]):
                found.append(model(input_ids=ids, past_key_values=cache, use_cache=True))
        assert found[-1].past_key_values is cache and type(found[-1]) is type(found[0])
        assert cache.get_seq_length() == 11
        answers.append((found, cache))
    (want, held), (got, cache) = answers
    torch.testing.assert_close(got[-1].logits, want[-1].logits, atol=1e-4, rtol=1e-4)
    for layer, other in zip(held.layers, cache.layers, strict=True):
        torch.testing.assert_close(other.keys, layer.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(other.values, layer.values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}])
def test_other_ways_to_generate_give_the_same_tokens(models: tuple[Any, Any], options: dict[str, Any]) -> None:
    masked, fast = models
    assert torch.equal(generated(fast, IDS, 5, **options), generated(masked, IDS, 5, **options))


def test_what_no_graph_serves_runs_by_layers_and_is_said_once(
    models: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, fast = models
    fast.__dict__["forward"]._said.clear()
    with caplog.at_level(logging.WARNING, "twofour"):
        for _ in range(2):
            want, got = (
                generated(model, IDS, 3, output_hidden_states=True, return_dict_in_generate=True) for model in models
            )
    assert torch.equal(got.sequences, want.sequences) and len(got.hidden_states) == 3
    assert [record.message for record in caplog.records] == [
        "a call with `output_hidden_states` runs layer by layer (said once)"
    ]


def test_a_configuration_that_asks_for_more_later_is_heeded(models: tuple[Any, Any], calls: list[str]) -> None:
    _, fast = models
    with torch.no_grad():
        before = fast(input_ids=IDS)
        try:
            fast.config.output_hidden_states = True
            cache = behind(fast, torch.no_grad)
            answers = [fast(input_ids=IDS), fast(input_ids=IDS, output_hidden_states=True)]
            answers.append(fast(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True))
        finally:
            fast.config.output_hidden_states = False
        assert [len(answer.hidden_states) for answer in answers] == [3, 3, 3] and before.hidden_states is None
        assert not calls and fast(input_ids=IDS[:, :1], past_key_values=cache).hidden_states is None
    assert calls == ["_stepped"]


def test_a_token_out_of_range_is_refused_as_by_the_model(models: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    for model in models:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache, use_cache=True)
            with pytest.raises(IndexError):
                model(input_ids=torch.tensor([[1000]]), past_key_values=cache, use_cache=True)


def test_copies_generate_too(models: tuple[Any, Any], calls: list[str]) -> None:
    masked, fast = models
    assert torch.equal(generated(copy.deepcopy(fast), IDS, 4), generated(masked, IDS, 4))
    assert set(calls) == {"_begun", "_stepped"}


def test_a_loaded_model_generates_on_graphs(models: tuple[Any, Any], calls: list[str], tmp_path: Path) -> None:
    masked, fast = models
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", masked)
    assert torch.equal(generated(loaded, IDS, 4), generated(masked, IDS, 4))
    assert set(calls) == {"_begun", "_stepped"}


def test_a_change_of_the_model_leaves_the_graphs(models: tuple[Any, Any], calls: list[str]) -> None:
    masked, fast = (copy.deepcopy(model) for model in models)
    for model in (masked, fast):
        generated(model, IDS, 2)
        with torch.no_grad():
            (model.model.norm if hasattr(model, "model") else model.transformer.ln_f).weight.mul_(-1.5)
    calls.clear()
    assert torch.equal(generated(fast, IDS, 4), generated(masked, IDS, 4))
    assert not calls


KINDS = [
    pytest.param(llama, "bfloat16", marks=pytest.mark.long),
    pytest.param(gpt2, "bfloat16", marks=pytest.mark.long),
    pytest.param(llama, "int4", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_bfloat16_model_has_fewer_calls_and_its_cache_is_bfloat16(kind: Any, dtype: str, calls: list[str]) -> None:
    from transformers import DynamicCache

    masked = twofour.prune(kind().bfloat16(), "2:4")
    fast = twofour.compile(masked, {"input_ids": IDS}, dtype=dtype, tokens=TOKENS)
    decoding: Any = fast.__dict__["forward"]
    names = set(decoding.step.program.python.labels)
    assert "attention" in names and not names & {"scaled_dot_product_attention", "layer_norm", "cat", "rsqrt"}, names
    answer = generated(fast, IDS, 3, return_dict_in_generate=True)
    assert answer.past_key_values.layers[0].keys.dtype is torch.bfloat16 and calls == ["_begun", *["_stepped"] * 2]
    held = [DynamicCache(config=fast.config) for _ in range(2)]
    with torch.no_grad():  # the layers' own answers, and the graph's
        own = [type(fast).forward(fast, i, past_key_values=held[0], use_cache=True) for i in (IDS, IDS[:, :1])]
        ours = [fast(input_ids=i, past_key_values=held[1], use_cache=True, logits_to_keep=1) for i in (IDS, IDS[:, :1])]
    for want, got in zip(own, ours, strict=True):
        assert got.logits.dtype is torch.bfloat16
        assert (got.logits[:, -1] - want.logits[:, -1]).norm() <= 0.03 * want.logits[:, -1].norm()


@pytest.mark.long
def test_times_are_of_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    raced: list[tuple[str, ...]] = []

    def race(calls: dict[str, Any], **_: Any) -> tuple[dict[str, float], float]:
        raced.append(tuple(calls))
        return dict(zip(calls, (2.0, 1.0), strict=True)), 0.0

    monkeypatch.setattr(decoding, "race", race)
    dense = gpt2(n_layer=1)
    for model in (dense, twofour.prune(copy.deepcopy(dense), "2:4")):
        twofour.compile(model, {"input_ids": IDS}, tokens=TOKENS)
    assert len(raced) == 4, "a step and a prompt of each model"


def test_the_plan_says_which_engine_runs_what() -> None:
    def said(step: float, prompt: float) -> tuple[Any, str]:
        given = {"step": {"layers": 2.0, "graph": step}, "prompt": {"layers": 2.0, "graph": prompt}}
        return decoding._faster(cast(Any, kept), given, "1 x 9 tokens", "")

    kept = SimpleNamespace()
    prompt = "a prompt 3.000 ms as a graph, 2.000 ms layer by layer, which it runs"
    assert said(1.0, 3.0) == (
        kept,
        f"decoding (1 x 9 tokens): a step 1.000 ms as a graph, 2.000 ms layer by layer; {prompt}",
    )
    assert said(2.1, 1.0) == (kept, said(2.1, 1.0)[1]), "within 5 % is the noise of a machine"
    assert said(2.2, 1.0)[0] is None and said(2.2, 1.0)[1].endswith("; the layers are faster")


def stepped(model: Any, **given: Any) -> Any:
    """What a model answers to one more token behind the cache of `IDS`, and to another one behind that."""
    from transformers import DynamicCache

    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(input_ids=IDS.repeat(2, 1), past_key_values=cache, use_cache=True)
        token = torch.tensor([[5], [7]])
        first = model(input_ids=token, past_key_values=cache, **given).logits
        return first, model(input_ids=token, past_key_values=cache).logits


MASK = torch.ones(2, 10, dtype=torch.int64)

MASK[1, :4] = 0

LAST = torch.ones(2, 10, dtype=torch.int64)

LAST[1, -1] = 0

AT = torch.full((2, 1), 9)


@pytest.mark.parametrize(
    ("given", "by"),
    [
        ({"attention_mask": MASK, "position_ids": AT}, ["_stepped", "_stepped"]),  # the second call sees all again
        ({"attention_mask": LAST, "position_ids": AT}, ["_stepped", "_stepped"]),
        ({"attention_mask": MASK}, ["_stepped"]),
        ({"logits_to_keep": torch.tensor([0])}, ["_stepped"]),
        ({"labels": torch.zeros(2, 1, dtype=torch.int64)}, ["_stepped"]),
    ],
)
def test_arguments_of_a_step_are_heeded_or_left_to_the_layers(
    models: tuple[Any, Any], calls: list[str], given: dict[str, Any], by: list[str]
) -> None:
    masked, fast = models
    torch.testing.assert_close(stepped(fast, **given), stepped(masked, **given), rtol=1e-4, atol=1e-5)
    assert [call for call in calls if not call.startswith("_begun")] == by


@pytest.mark.long
def test_types_of_tokens_are_no_padding(calls: list[str]) -> None:
    """A tensor of one zero is an argument, not an answer of no."""
    model = gpt2()
    fast = twofour.compile(model, {"input_ids": IDS}, tokens=TOKENS)
    given = {"token_type_ids": torch.zeros(2, 1, dtype=torch.int64)}
    torch.testing.assert_close(stepped(fast, **given), stepped(model, **given), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_an_example_as_long_as_the_positions_keeps_the_graphs(calls: list[str]) -> None:
    ids = torch.randint(1, 90, (1, 256), generator=torch.Generator().manual_seed(0))
    model = gpt2()
    fast = twofour.compile(model, {"input_ids": ids}, tokens=TOKENS)
    assert torch.equal(generated(fast, IDS), generated(model, IDS)) and "_stepped" in calls


def test_a_graph_that_answers_in_another_type_is_refused() -> None:
    def program(*leaves: Tensor) -> list[Tensor]:
        return [*leaves]

    given = torch.randn(3)
    vars(program)["python"] = program
    guard, outputs = SimpleNamespace(leaves=lambda _: [given]), SimpleNamespace(value=lambda leaves: leaves)
    runner: Any = SimpleNamespace(model=torch.nn.Linear(1, 1), guard=guard, outputs=outputs, program=program)
    plan: Any = SimpleNamespace(dtype="float32")
    assert decoding._agree(runner, plan, {}, lambda: [given], "a step") == 0
    with pytest.raises(RefusedError, match="a step differs from the layers in the type or shape of an answer"):
        decoding._agree(runner, plan, {}, lambda: [given.double()], "a step")


def test_attention_that_adds_its_mask_is_refused() -> None:
    fast = twofour.compile(gpt2(attn_implementation="eager", n_layer=1), {"input_ids": IDS}, tokens=TOKENS)
    assert any('its attention is "eager"' in note for note in fast.plan.notes)

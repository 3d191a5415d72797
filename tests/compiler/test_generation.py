"""`generate` in a loop of its own: the tokens of transformers' loop over the same graphs, and what is left to that."""

import copy
import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import twofour
from tests.compiler.decoders import IDS, PADDED, calls, generated, gpt2, graphs, models  # noqa: F401  fixtures
from twofour.generation import Generation, left_out
from twofour.generation.caches import ROOM, empty_cache
from twofour.generation.names import NAMES, argument_of, cache_in, name_of

from .small import TOKENS

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")

TWO = torch.cat([IDS, IDS.flip(1)])
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


@contextmanager
def transformers_loop(fast: Any) -> Iterator[None]:
    """The same graphs under transformers' own loop."""
    ours = fast.__dict__.pop("generate")
    try:
        yield
    finally:
        object.__setattr__(fast, "generate", ours)


def both(fast: Any, ids: Tensor, new: int = 12, **options: Any) -> tuple[Any, Any]:
    """What this loop and transformers' generate."""
    assert isinstance(fast.__dict__["generate"], Generation)
    torch.manual_seed(1)
    ours = generated(fast, ids, new, **options)
    torch.manual_seed(1)
    with transformers_loop(fast):
        return ours, generated(fast, ids, new, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SAMPLED,
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"cache_implementation": "static"},
        {"max_time": 60.0},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
@pytest.mark.parametrize("ids", [IDS, TWO], ids=["1", "2"])
def test_tokens_are_those_of_transformers_loop(
    models: tuple[Any, Any],  # noqa: F811
    calls: list[str],  # noqa: F811
    ids: Tensor,
    options: dict[str, Any],
) -> None:
    fast = models[1]
    ours, theirs = both(fast, ids, **options)
    assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype
    assert calls == ["_begun", *["_stepped"] * 11] * 2


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_padded_prompts_and_room_that_grows(models: tuple[Any, Any], options: dict[str, Any]) -> None:  # noqa: F811
    ours, theirs = both(models[1], TWO, ROOM + 9, attention_mask=PADDED, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("least", [None, 4])
def test_rows_end_where_their_words_do(models: tuple[Any, Any], least: int | None) -> None:  # noqa: F811
    fast = models[1]
    plain = generated(fast, TWO, 8)
    for words in (int(plain[0, 11]), plain[:, 13].tolist()):
        ours, theirs = both(fast, TWO, 12, eos_token_id=words, pad_token_id=95, min_new_tokens=least)
        assert torch.equal(ours, theirs), words
    assert least or ours.shape[1] < 21 or (ours == 95).any(), "a row has ended before the other"


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.seen.append([])


def test_a_streamer_is_given_each_token(models: tuple[Any, Any]) -> None:  # noqa: F811
    ours, theirs = Streamer(), Streamer()
    tokens = generated(models[1], IDS, 5, streamer=ours)
    with transformers_loop(models[1]):
        generated(models[1], IDS, 5, streamer=theirs)
    assert ours.seen == theirs.seen and ours.seen[0] == IDS[0].tolist() and ours.seen[-1] == []
    assert [one for seen in ours.seen for one in seen] == tokens[0].tolist()


def test_criteria_and_processors_of_a_caller_are_asked(models: tuple[Any, Any]) -> None:  # noqa: F811
    def enough(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None
        return torch.full((len(ids),), ids.shape[1] >= 13)

    def never(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill_(1, ids[:, -1], -torch.inf)

    ours, theirs = both(models[1], TWO, 12, stopping_criteria=[enough], logits_processor=[never])
    assert torch.equal(ours, theirs) and ours.shape[1] == 13
    assert not (ours[:, 9:] == ours[:, 8:-1]).any()


def test_processors_that_hide_words_and_those_that_take_more(models: tuple[Any, Any]) -> None:  # noqa: F811
    class Asks:
        def __call__(self, ids: Tensor, scores: Tensor, more: Any) -> Tensor:
            return scores

    hides = {"suppress_tokens": [3, 3, 40, 95, 960], "begin_suppress_tokens": list(range(90))}
    asked = {"return_dict_in_generate": True, "output_scores": True, **hides}
    ours, theirs = both(models[1], TWO, 5, **asked)
    assert all(torch.equal(one, other) for one, other in zip(ours.scores, theirs.scores, strict=True))
    assert [int(score.isneginf().sum()) for score in ours.scores] == [2 * 91, *[2 * 3] * 4]
    with pytest.raises(ValueError, match="all the required parameters"):
        generated(models[1], IDS, 4, logits_processor=[Asks()])


def test_a_cache_of_the_caller_has_the_keys_of_all_tokens(models: tuple[Any, Any]) -> None:  # noqa: F811
    from transformers import DynamicCache

    held = []
    for own in (True, False):
        cache = DynamicCache(config=models[1].config)
        if own:
            generated(models[1], IDS, 6, past_key_values=cache)
        else:
            with transformers_loop(models[1]):
                generated(models[1], IDS, 6, past_key_values=cache)
        held.append(cache)
    assert held[0].get_seq_length() == 14
    for one, other in zip(held[0].layers, held[1].layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_criteria_and_scores_of_other_types_are_taken(models: tuple[Any, Any]) -> None:  # noqa: F811
    def enough(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), int(ids.shape[1] >= 13))

    def rounded(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.bfloat16()

    for options in ({}, SAMPLED):
        ours, theirs = both(models[1], TWO, 12, stopping_criteria=[enough], logits_processor=[rounded], **options)
        assert torch.equal(ours, theirs) and ours.shape[1] == 13
    ours, theirs = both(models[1], TWO, 4, stopping_criteria=[lambda ids, *_, **__: torch.full((len(ids),), 2)])
    assert torch.equal(ours, theirs) and ours.shape[1] > TWO.shape[1] + 1  # of 2 the last bit is not set
    with pytest.raises(TypeError, match="NoneType"):
        generated(models[1], IDS, 4, stopping_criteria=[lambda *_, **__: None])


def test_a_cache_of_the_caller_is_whole_after_every_step(models: tuple[Any, Any]) -> None:  # noqa: F811
    from transformers import DynamicCache

    def seen(cache: Any) -> tuple[list[int], Any]:
        lengths: list[int] = []

        def looks(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            lengths.append(cache.get_seq_length())
            return torch.zeros(len(ids), dtype=torch.bool)

        return lengths, looks

    cache = DynamicCache(config=models[1].config)
    lengths, looks = seen(cache)
    generated(models[1], IDS, 5, past_key_values=cache, stopping_criteria=[looks])
    assert lengths == [9, 10, 11, 12, 13]


def interrupted(*_: object) -> bool:
    raise KeyboardInterrupt


def test_an_interrupted_call_leaves_a_whole_cache(models: tuple[Any, Any]) -> None:  # noqa: F811
    from transformers import DynamicCache

    cache, count = DynamicCache(config=models[1].config), 0

    def ending(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        nonlocal count
        count += 1
        return torch.zeros(len(ids), dtype=torch.bool) if count < 5 else interrupted()  # type: ignore[return-value]

    with pytest.raises(KeyboardInterrupt):
        generated(models[1], IDS, 12, past_key_values=cache, stopping_criteria=[ending])
    assert cache.get_seq_length() == 9 + 4


def said_once(fast: Any, caplog: pytest.LogCaptureFixture, why: str, call: Callable[[], tuple[Any, Any]]) -> None:
    """Raise where two calls, each in both loops, give other tokens, or are not told once why the loop is not ours."""
    fast.__dict__["generate"]._said.clear()
    with caplog.at_level(logging.INFO, "twofour.generation"):
        answers = [answer for _ in range(2) for answer in call()]
    tokens = [getattr(answer, "sequences", answer) for answer in answers]
    assert all(torch.equal(one, tokens[0]) for one in tokens)
    said = [record.message for record in caplog.records if record.name == "twofour.generation"]
    assert said == [f"generate() {why} runs in transformers' own loop, with graphs where they serve (said once)"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "by beam search"),
        ({"prefill_chunk_size": 4}, "with `prefill_chunk_size`"),
        ({"tokenizer": object()}, "with `tokenizer`"),
        ({"use_cache": False}, "without token ids or a cache"),
        ({"prompt_lookup_num_tokens": 2}, "by assisted generation"),
    ],
)
def test_what_the_loop_does_not_do_is_transformers_own_and_said_once(
    models: tuple[Any, Any],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    why: str,
) -> None:
    said_once(models[1], caplog, why, lambda: both(models[1], IDS, 5, **options))


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_scores_and_logits_are_those_of_transformers_loop(models: tuple[Any, Any], options: dict[str, Any]) -> None:  # noqa: F811
    def never(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ids[0, -1]] = -torch.inf  # in place
        return scores

    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "logits_processor": [never]}
    ours, theirs = both(models[1], TWO, 6, attention_mask=PADDED, repetition_penalty=1.3, **asked, **options)
    assert type(ours) is type(theirs) and ours.keys() == theirs.keys() and len(ours.scores) == 6
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.scores + ours.logits, theirs.scores + theirs.logits, strict=True):
        assert torch.equal(one, other)
    same_cache(ours.past_key_values, theirs.past_key_values)


def test_criteria_are_given_the_scores_that_are_kept(models: tuple[Any, Any]) -> None:  # noqa: F811
    def three(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), len(scores) == 3)

    answer = generated(models[1], IDS, 9, stopping_criteria=[three], return_dict_in_generate=True, output_scores=True)
    assert answer.sequences.shape[1] == 9 + 3 == len(IDS[0]) + len(answer.scores) and answer.logits is None


def same_cache(one: Any, other: Any) -> None:
    assert type(one) is type(other) and one.get_seq_length() == other.get_seq_length()
    for layer, same in zip(one.layers, other.layers, strict=True):
        assert torch.equal(layer.keys, same.keys) and torch.equal(layer.values, same.values)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("whole", [True, False], ids=["all tokens again", "new tokens alone"])
def test_a_conversation_goes_on_behind_its_cache(
    models: tuple[Any, Any],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    static: bool,
    whole: bool,
) -> None:
    from transformers import DynamicCache, StaticCache

    fast = models[1]

    def turns() -> tuple[list[Tensor], Any]:
        cache = StaticCache(config=fast.config, max_cache_len=99) if static else DynamicCache(config=fast.config)
        seen, said, mask = TWO, [], PADDED
        for _ in range(3):
            answer = generated(fast, seen, 5, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True)
            assert answer.past_key_values is cache
            said.append(answer.sequences)
            mask = torch.cat([mask, torch.ones(2, 5 + 9, dtype=torch.int64)], 1)
            seen = torch.cat([answer.sequences if whole else answer.sequences[:, -1:], TWO.flip(1)], 1)
        return said, cache

    fast.__dict__["generate"]._said.clear()
    with caplog.at_level(logging.INFO, "twofour.generation"):
        ours, cache = turns()
    assert not [record for record in caplog.records if record.name == "twofour.generation"]
    with transformers_loop(fast):
        theirs, other = turns()
    assert all(torch.equal(one, same) for one, same in zip(ours, theirs, strict=True))
    same_cache(cache, other)


def test_hooks_and_own_methods_are_heeded(models: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    fast, seen = copy.deepcopy(models[1]), []
    handle = fast.register_forward_hook(lambda *_: seen.append(1))
    with caplog.at_level(logging.INFO, "twofour.generation"):
        generated(fast, IDS, 4)
        assert len(seen) == 4 and "of a model with forward hooks" in caplog.text
        handle.remove()
        fast.prepare_inputs_for_generation = fast.prepare_inputs_for_generation
        generated(fast, IDS, 4)
    assert "of a model with a `prepare_inputs_for_generation` of its own" in caplog.text


def test_a_model_with_methods_of_its_own_keeps_them(models: tuple[Any, Any]) -> None:  # noqa: F811
    kind = type(models[1])
    assert left_out(models[1]) == ""
    other: Any = type("Other", (kind,), {"_sample": lambda *_, **__: None})(models[1].config)
    assert left_out(other) == "of a model with a `_sample` of its own"


def test_the_plan_says_whose_loop_generate_is(models: tuple[Any, Any]) -> None:  # noqa: F811
    said = next(note for note in models[1].plan.notes if note.startswith("generate()"))
    assert said.startswith("generate() takes one token after the other in a loop of its own; beam search, assistants")
    assert f"\n{said}" in str(models[1].plan), "a line of its own"


def test_the_plan_says_that_a_model_with_a_loop_of_its_own_keeps_it() -> None:
    model = gpt2(n_layer=1)
    other: Any = type("Own", (type(model),), {"generate": type(model).generate, "_sample": lambda *_: None})
    fast: Any = twofour.compile(other(model.config).eval(), {"input_ids": IDS}, tokens=TOKENS)
    whose = "of a model with a `_sample` of its own runs in transformers' own loop, with graphs where they serve"
    assert "generate" not in fast.__dict__ and f"generate() {whose}" in fast.plan.notes


def test_a_decoder_without_graphs_of_its_calls_is_told_why() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    for model, example, why in (
        (gpt2(n_layer=1), IDS[:, :1], "the example is no prompt, `input_ids` (batch, tokens) of two tokens or more"),
        (
            BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2)).eval(),
            IDS,
            "its forward takes no `position_ids`",
        ),
    ):
        fast: Any = twofour.compile(model, {"input_ids": example}, tokens=TOKENS)
        assert f"decoding runs layer by layer: {why}" in fast.plan.notes


def test_a_cache_of_another_name_is_served(calls: list[str]) -> None:  # noqa: F811
    model = gpt2(n_layer=1)
    kind: Any = type(model)
    own = argument_of(model)

    def forward(self: Any, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None,
                use_cache: Any = None, logits_to_keep: Any = 0) -> Any:  # fmt: skip
        given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
        return kind.forward(self, input_ids=input_ids, logits_to_keep=logits_to_keep, **{own: cache}, **given)

    other: Any = type("Newer", (kind,), {"forward": forward})(model.config).eval()
    other.load_state_dict(model.state_dict())
    fast: Any = twofour.compile(other, {"input_ids": IDS}, tokens=TOKENS)
    assert torch.equal(generated(fast, IDS, 4), generated(model, IDS, 4)) and calls == ["_begun", *["_stepped"] * 3]
    for name in NAMES:
        calls.clear()
        cache = empty_cache(model)
        fast(input_ids=IDS, use_cache=True, logits_to_keep=1, **{name: cache})
        answer = fast(input_ids=IDS[:, :1], **{name: cache})
        assert calls == ["_begun", "_stepped"] and cache_in(answer) is cache and cache.get_seq_length() == 10


def test_names_of_a_cache() -> None:
    assert [name_of(names) for names in ((), NAMES[:1], NAMES[1:], NAMES)] == [NAMES[0], NAMES[0], NAMES[1], NAMES[0]]
    assert cache_in({"cache": 1}) == cache_in({"past_key_values": 1, "cache": 2}) == 1
    assert cache_in({}) is None and cache_in(()) is None


def without_capturing(model: Any) -> Any:
    """Take away what transformers leaves at modules once hidden states were asked for: no pickle takes it."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if "output_capturing_hook" in getattr(hook, "__qualname__", ""):
                del module._forward_hooks[key]
    return model


def test_signature_copies_and_pickles(models: tuple[Any, Any]) -> None:  # noqa: F811
    fast = models[1]
    assert "max_length" not in (names := inspect.signature(fast.generate).parameters) and "streamer" in names
    want = generated(fast, IDS, 4)
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(without_capturing(copy.deepcopy(fast))))):
        assert again.generate.model is again
        assert torch.equal(generated(again, IDS, 4), want)

"""The cache around a decoder's graphs: its room, its copies, its modes, and steps behind what others left in it."""

# ruff: noqa: F811  the fixtures of tests/compiler/decoders.py

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import twofour
from tests.compiler.decoders import (
    IDS,
    behind,
    calls,  # noqa: F401  a fixture
    graphs,  # noqa: F401  a fixture
    models,  # noqa: F401  a fixture
)
from tests.turns import in_turn
from twofour.compiler.cache_calls import joined, pair_of, stacked
from twofour.generation.caches import ROOM, Buffers

pytestmark = pytest.mark.usefixtures("no_measuring", "graphs")


def test_two_continuations_of_one_cache_do_not_meet(models: tuple[Any, Any]) -> None:
    from transformers import DynamicCache

    answers = []
    for model in models:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=IDS, past_key_values=cache, use_cache=True)
            model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
            other = copy.deepcopy(cache)
            model(input_ids=IDS[:, 1:2], past_key_values=cache, use_cache=True)
            model(input_ids=IDS[:, 2:3], past_key_values=other, use_cache=True)
            cache.crop(-3)
            answers.append(
                [model(input_ids=IDS[:, 3:4], past_key_values=c, use_cache=True).logits for c in (cache, other)]
            )
    torch.testing.assert_close(answers[1], answers[0], atol=1e-4, rtol=1e-4)


def test_buffers_have_room_and_grow() -> None:
    from twofour.generation.caches import cache_of

    past = [(torch.randn(2, 2, 50, 4), torch.randn(2, 2, 50, 4)) for _ in range(2)]
    cache = cache_of(past)
    buffers = Buffers.of(cache)
    added = [torch.randn(2, 2, 1, 4) for _ in range(4)]
    for step in range(14):
        assert Buffers.of(cache) is buffers, step
        buffers.append(added, cache)
    assert buffers.length == 64 and buffers.leaves[0].shape[2] == ROOM
    larger = Buffers.of(cache)
    assert larger is not buffers and larger.leaves[0].shape[2] == 2 * ROOM
    assert torch.equal(cache.layers[1].values[:, :, :50], past[1][1])
    assert torch.equal(cache.layers[1].values[:, :, 50:], added[3].expand(-1, -1, 14, -1))
    assert larger.mask.sum() == 2 * 65


@pytest.mark.parametrize("widths", [(4, 4), (4, 6)], ids=["alike", "values wider than keys"])
def test_buffers_of_a_copied_cache_are_its_own(widths: tuple[int, int]) -> None:
    from twofour.generation.caches import cache_of

    past = [tuple(torch.randn(1, 2, 5, width) for width in widths) for _ in range(2)]
    cache = cache_of(past)
    added = [torch.randn(1, 2, 1, width) for _ in range(2) for width in widths]
    given = joined(added)
    assert isinstance(given, torch.Tensor) == (widths[0] == widths[1])
    Buffers.of(cache).append(given, cache)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        Buffers.of(again).append(given, again)
        assert (Buffers.of(again).length, Buffers.of(cache).length) == (7, 6)
        for index, (layer, kept) in enumerate(zip(again.layers, cache.layers, strict=True)):
            for at, held in enumerate(pair_of(layer)):
                new = added[2 * index + at]
                assert torch.equal(held, torch.cat([past[index][at], new, new], 2))
                assert torch.equal(Buffers.of(again).leaves[2 * index + at][:, :, :7], held), "the graph reads it"
            assert kept.keys.shape[2] == 6


def test_what_a_step_adds_is_stacked_as_torch_does() -> None:
    wide = torch.randn(3, 1, 6, 8)
    for one in (wide, wide.bfloat16()):
        added = [one.narrow(3, 0, 4).transpose(1, 2), one.narrow(3, 4, 4).transpose(1, 2)]
        assert torch.equal(stacked(added), torch.stack(added))


def test_a_gradient_of_keys_is_not_lost(models: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    masked, fast = models
    fast.__dict__["forward"]._said.clear()

    def wanted(model: Any) -> Any:
        cache = behind(model, torch.no_grad)
        for layer in cache.layers:
            layer.keys, layer.values = (one.clone().requires_grad_() for one in (layer.keys, layer.values))
        return cache

    ours, theirs = wanted(fast), wanted(masked)
    keys = theirs.layers[0].keys
    masked(input_ids=IDS[:, :1], past_key_values=theirs).logits.sum().backward()
    assert keys.grad is not None and keys.grad.abs().sum() > 0
    asked = pytest.raises(twofour.errors.KernelError, match="asked for a gradient")
    with caplog.at_level(logging.WARNING, "twofour"), asked:
        fast(input_ids=IDS[:, :1], past_key_values=ours)
    assert "that a gradient is asked for runs layer by layer" in caplog.text
    with torch.no_grad():  # nobody asks
        answers = [model(input_ids=IDS[:, :1], past_key_values=wanted(model)).logits for model in models]
    torch.testing.assert_close(answers[1], answers[0], atol=1e-5, rtol=1e-4)


@in_turn("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@in_turn("first", [torch.inference_mode, torch.no_grad])
def test_a_cache_of_one_mode_serves_in_another(models: tuple[Any, Any], first: Any, second: Any) -> None:
    answers: list[list[Tensor]] = []
    for model in models:
        cache = behind(model, first)
        with second():
            answers.append([])
            for token in range(3):
                answer = model(input_ids=IDS[:, token : token + 1], past_key_values=cache).logits
                assert answer.is_inference() == (second is torch.inference_mode)
                answers[-1].append(answer.detach())
            cache.reorder_cache(torch.tensor([0]))
            answers[-1].append(model(input_ids=IDS[:, :1], past_key_values=cache).logits.detach())
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-5)


def test_each_model_looks_at_a_cache_itself(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = models
    other = copy.deepcopy(fast)
    looked = []
    for model in (fast, other):
        guard = model.__dict__["forward"].step.guard
        monkeypatch.setattr(guard, "leaves", lambda given, own=guard.leaves, of=model: looked.append(of) or own(given))
    with torch.no_grad():
        cache = behind(fast, torch.no_grad)
        for model in (fast, fast, other, other, fast):
            model(input_ids=IDS[:, :1], past_key_values=cache)
        copied = copy.deepcopy(cache)
        fast(input_ids=IDS[:, :1], past_key_values=copied)
    steps = [one for one in looked if one is fast], [one for one in looked if one is other]
    assert [len(one) for one in steps] == [3, 1]


def test_a_cache_of_layers_that_differ_is_left_to_the_layers(models: tuple[Any, Any], calls: list[str]) -> None:
    from transformers import DynamicCache

    answers = []
    for model in models:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(input_ids=IDS, past_key_values=cache, use_cache=True)
            layer: Any = cache.layers[1]
            layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
            answers.append(model(input_ids=IDS[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-5)
    assert calls[-1] == "_stepped by layers"

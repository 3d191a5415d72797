"""Outliers before int8: a normalisation that is read in another way, or may be, is left, and the plan says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compiler.small import quick
from tests.compiler.test_smoothing import INT8, WIDE, WIDTH, Block, batches
from tests.turns import in_turn
from twofour.compiler import against_dense
from twofour.compiler.smoothing import smoothed


class Heads(nn.Module):
    """Layers behind one normalisation, read in ways that a call chooses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.a, self.kind = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), kind
        if kind in ("heads", "part"):
            self.b = nn.Linear(WIDTH, WIDTH)
        if kind == "tied":
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.out.weight = self.a.weight
        with torch.no_grad():
            self.norm.weight[list(WIDE)] *= 30

    def forward(self, x: Tensor, task: str = "a") -> Any:
        h = self.norm(x)
        if self.kind == "heads":
            return self.a(h) if task == "a" else self.b(h)
        if self.kind == "length":
            return self.a(h) + h if x.shape[1] > 16 else self.a(h)
        if self.kind == "tied":
            return self.out(self.a(h))
        if self.kind == "part":
            return self.a(h), self.b(h[:, 0])
        if self.kind == "in place":
            return self.a(h.mul_(2))
        return (self.a(h), h) if self.kind == "returned" else self.a(h)


def notes(model: nn.Module, data: list[Tensor]) -> list[str]:
    fast = quick(model, data[0], dtype="int8", data=data, smooth=True)
    return [note for note in fast.plan.notes if note.startswith("outliers")]  # type: ignore[union-attr]


LONG = torch.randn(8, 24, WIDTH, generator=torch.Generator().manual_seed(2))


@in_turn(
    ("kind", "data", "why"),
    [
        ("heads", batches(), "`b.weight`, of its width, is not read on the data"),
        ("length", [*batches(20), LONG], "its answer is read elsewhere too"),
        ("length", [*batches(3), LONG], "its answer is read elsewhere too"),
        ("tied", batches(3), "its layers, or their weights, are used for something else too"),
        ("part", batches(3), "its answer is read elsewhere too"),
        ("in place", batches(3), "its answer is read elsewhere too"),
        ("returned", batches(3), "its answer is returned by a module around it"),
    ],
)
def test_another_reader_leaves_it(kind: str, data: list[Tensor], why: str) -> None:
    assert notes(Heads(kind).eval(), data) == [f"outliers: not smoothed; left `norm`: {why}"]


def test_hidden_states_of_a_decoder_stay() -> None:
    """The last normalisation's answer is last_hidden_state, and the last of the hidden states."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False, eos_token_id=None)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight[list(WIDE)] *= 30
    data = [{"input_ids": torch.randint(1, 80, (4, 12))} for _ in range(4)]
    fast: Any = quick(model, data[0], dtype="int8", data=data, smooth=True, graph=False)
    (said,) = (note for note in fast.plan.notes if note.startswith("outliers"))
    assert "left `model.norm`: its answer is returned by a module around it" in said
    if "smoothed (alpha" in said:  # the layers may be dense again on a loaded machine
        assert "`model.layers.0.input_layernorm` 0." in said.split("; left")[0]
    with torch.no_grad():
        want, got = (m(data[0]["input_ids"], output_hidden_states=True).hidden_states[-1] for m in (model, fast))
        inner, own = (m.model(data[0]["input_ids"]).last_hidden_state for m in (model, fast))
    assert (got - want).norm() < 0.1 * want.norm() and (own - inner).norm() < 0.1 * inner.norm()


def test_bfloat16_is_scaled_by_powers_of_two() -> None:
    """Other scales round gains and weights, which changes what the model answers."""
    model = Heads("one").eval().bfloat16()
    data = [x.bfloat16() for x in batches(4)]
    with torch.no_grad():
        found = smoothed(model, data, INT8)
        assert [group.why for group in found.groups] == [""] and found.model is not model
        assert torch.equal(found.model(data[0]), model(data[0]))


def test_scales_leave_with_the_layers_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"dense": 1.0, "compiled": 2.0}
    monkeypatch.setattr(against_dense, "_times", lambda *_: slow)
    model = Block(nn.LayerNorm).eval()
    fast: Any = quick(model, batches()[0], dtype="int8", data=batches(3), smooth=True)
    assert "outliers: not smoothed; left `norm`: the layers that read it are dense again" in fast.plan.notes
    assert torch.equal(fast.norm.weight, model.norm.weight) and torch.equal(fast.first.weight, model.first.weight)


def test_layers_that_stay_dense_are_named() -> None:
    model = Heads("one").eval().double()
    (said,) = notes(model, [x.double() for x in batches(3)])
    assert said.startswith("outliers: not smoothed; left `norm`: `a` stays dense: its weight is torch.float64")

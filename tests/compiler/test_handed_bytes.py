"""Activations between layers in bytes: who writes them, what they compute, what stays as it is; attention in int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.graph.small import Encoder, GatedBlock
from twofour.compiler import attention_bytes, attention_int8, fused_matmuls, graph_rewrites
from twofour.compiler import graph as compiled_graph
from twofour.compiler.attention_bytes import LOG2_E, Ranged
from twofour.compiler.attention_int8 import IN_INT8, MOST_OFF, off_in_int8
from twofour.compiler.handed_bytes import IN_BYTES
from twofour.measure.distance import distance

SHAPE = (2, 19)
pytestmark = pytest.mark.usefixtures("no_measuring")


def compiled(model: nn.Module, *example: Tensor, data: Any = None) -> Any:
    return twofour.compile(model, example, dtype="int8", graph=True, tokens=(1, 32), data=data)


@pytest.fixture
def encoder() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = twofour.prune(Encoder(layers=2).eval().requires_grad_(False), "2:4")
    return model, (torch.randint(0, 50, SHAPE), torch.ones(SHAPE))


def handed(fast: Any) -> int:
    return fast.plan.account.rewrites[IN_BYTES]


def test_an_encoder_hands_bytes_to_every_product(encoder: tuple[nn.Module, tuple[Tensor, Tensor]]) -> None:
    model, example = encoder
    fast = compiled(model, *example, data=[example])
    assert handed(fast) == 2 * 4, "a norm before q, k and v, attention, the norm behind it, and the activation"
    assert f"{IN_BYTES} 8" in str(fast.plan)
    want = model(*example)
    layers = twofour.compile(model, example, dtype="int8", graph=False, tokens=(1, 32), data=[example])
    # What is not bytes is bfloat16 in the graph.
    assert distance([fast(*example)], [want]) <= distance([layers(*example)], [want]) + 2**-8
    for rows, length in ((1, 1), (3, 7), (1, 19)):  # sizes that it was not compiled on
        given = example[0][:1, :length].repeat(rows, 1), torch.ones(rows, length)
        layer_wise = distance([layers(*given)], [model(*given)])
        assert distance([fast(*given)], [model(*given)]) <= 1.5 * layer_wise + 2**-8


def test_products_and_norms_in_one_call_answer_the_bits_of_separate_calls(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch, every_isa: str
) -> None:
    model, example = encoder
    fast = compiled(model, *example, data=[example])
    labels = [call.label for call in fast.plan.account.outlines["after"].calls]
    assert sum(label.startswith("mlp+") for label in labels) == 2, labels
    assert "mlp+gelu+add+norm" in labels and labels.count("linear+add+norm") == 2, labels
    for rewrite in ("norms_into_products", "products_in_a_row"):
        monkeypatch.setattr(graph_rewrites, rewrite, lambda _: 0)
    apart = compiled(model, *example, data=[example])
    assert "linear+gelu" in [call.label for call in apart.plan.account.outlines["after"].calls]
    for rows, length in (SHAPE, (3, 7), (1, 1)):
        given = example[0][:1, :length].repeat(rows, 1), torch.ones(rows, length)
        assert torch.equal(fast(*given), apart(*given))


def test_a_range_of_each_token_hands_nothing_on(encoder: tuple[nn.Module, tuple[Tensor, Tensor]]) -> None:
    model, example = encoder
    assert handed(compiled(model, *example)) == 0


@pytest.mark.long
def test_its_times_are_its_own(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = encoder
    raced: list[object] = []

    def engines(*given: object) -> tuple[dict[str, float], float]:
        raced.append(given)
        return {"layers": 2.0, "graph": 1.0}, 0.0

    monkeypatch.setenv("TWOFOUR_CACHE", str(own_cache))
    monkeypatch.setattr(compiled_graph, "_engines", engines)
    for data in (None, [example], None, [example]):
        compiled(model, *example, data=data)
    assert len(raced) == 2, "a graph of static ranges is another than that of ranges of each token"


@pytest.mark.parametrize("handing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_so_are_those_of_its_joined_products(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]],
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    handing: bool,
) -> None:
    model, example = encoder
    raced: list[bool] = []

    def timed(layer: Any, *_: object) -> tuple[dict[str, float], float]:
        raced.append(layer.problem.quantization.dynamic)
        return {"together": 1.0, "apart": 2.0}, 0.0

    monkeypatch.setenv("TWOFOUR_CACHE", str(own_cache))
    monkeypatch.setattr(fused_matmuls, "together_and_apart", timed)
    if not handing:  # then both read the same type
        monkeypatch.setattr(graph_rewrites, "hand_on_bytes", lambda *_: 0)
    for data in (None, [example]):
        compiled(model, *example, data=data)
    assert raced == [True, False], "once for both layers of a kind, whatever their ranges"


def test_a_gate_stays_as_it_is(every_isa: str) -> None:
    torch.manual_seed(0)
    model, x = twofour.prune(GatedBlock().eval().requires_grad_(False), "2:4"), torch.randn(2, 20, 64)
    fast = compiled(model, x, data=[(x,)])
    assert handed(fast) == 3, "two norms and attention: a gated product has a second operand of another type"
    assert distance([fast(x)], [model(x)]) < 0.1


def test_an_answer_that_others_read_is_kept() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.relu(self.first(x))
            return y, self.third(torch.relu(self.second(y)))

    torch.manual_seed(0)
    model, x = twofour.prune(Both().eval().requires_grad_(False), "2:4"), torch.randn(32, 64)
    fast = compiled(model, x, data=[x])
    assert handed(fast) == 1, "what is an answer of the model stays real"
    for got, want in zip(fast(x), model(x), strict=True):
        assert distance([got], [want]) < 0.05


def test_a_file_holds_it(encoder: tuple[nn.Module, tuple[Tensor, Tensor]], tmp_path: Path) -> None:
    model, example = encoder
    fast = compiled(model, *example, data=[example])
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", Encoder(layers=2), graph=True, example=example)
    assert handed(loaded) == 8
    torch.testing.assert_close(loaded(*example), fast(*example))


def test_a_token_that_is_not_finite_stays_by_itself(every_isa: str) -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), "2:4")
    x = torch.randn(40, 64)
    fast = compiled(model.eval().requires_grad_(False), x, data=[x])
    assert handed(fast) == 2
    broken = x.clone()
    broken[3], broken[7, 5] = torch.nan, torch.inf
    same = [row for row in range(40) if row not in (3, 7)]
    assert torch.equal(fast(broken)[same], fast(x)[same])
    assert fast(broken)[[3, 7]].isfinite().all(), "a number outside of a static range takes its end, a NaN its least"


@pytest.fixture
def faster_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_int8, "_raced", lambda *_: ({"bfloat16": 2.0, "int8": 1.0}, 0.0))


@pytest.mark.parametrize("calibrated", [True, False])
def test_attention_in_int8(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], faster_in_int8: None, calibrated: bool, tmp_path: Path
) -> None:
    model, example = encoder
    fast = compiled(model, *example, data=[example] if calibrated else None)
    account = fast.plan.account
    assert account.rewrites[IN_INT8] == 2 and f"{IN_INT8} 2" in str(fast.plan)
    said = "attention: in int8 takes 0.50 of the time that it takes in bfloat16; with it the answer on the example is"
    assert said in str(fast.plan)
    judged = "of 4 to 19 keys, judged on the example alone, and in bfloat16 of fewer or more"
    assert (judged in str(fast.plan)) == (not calibrated)
    assert [time.calls for time in account.after if time.operator == IN_INT8] == [2]
    assert ("queries, keys and values are bytes by ranges of the data" in str(fast.plan)) == calibrated
    layers = twofour.compile(model, example, dtype="int8", graph=False, tokens=(1, 32), data=[example])
    for rows, length in (SHAPE, (1, 1), (3, 7), (1, 19)):
        given = example[0][:1, :length].repeat(rows, 1), torch.ones(rows, length)
        layer_wise = distance([layers(*given)], [model(*given)])
        assert distance([fast(*given)], [model(*given)]) <= 1.5 * layer_wise + 2**-6
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", Encoder(layers=2), graph=True, example=example)
    assert loaded.plan.account.rewrites[IN_INT8] == 2
    assert torch.equal(loaded(*example), fast(*example))


def test_padding_changes_no_bit_of_attention_in_int8(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], faster_in_int8: None
) -> None:
    model, example = encoder
    fast = compiled(model, *example, data=[example])
    mask = torch.ones(SHAPE)
    mask[1, 11:] = 0
    found = fast(example[0], mask)
    with twofour.calls.without_fast_paths():
        padded = fast(example[0], mask)
    alone = fast(example[0][1:, :11], mask[1:, :11])
    assert torch.equal(found[1, :11], alone[0]) and torch.equal(padded[1, :11], alone[0])


def test_why_attention_stays_in_floats(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = encoder
    slower = compiled(model, *example, data=[example])
    assert slower.plan.account.rewrites[IN_INT8] == 0
    assert "attention: in bfloat16: in int8 takes 2.00 of the time that it takes in bfloat16" in str(slower.plan)
    monkeypatch.setattr(attention_int8, "_raced", lambda *_: ({"bfloat16": 2.0, "int8": 1.0}, 0.0))
    monkeypatch.setattr(attention_int8, "MORE", 0.0)
    moved = compiled(model, *example, data=[example])
    assert moved.plan.account.rewrites[IN_INT8] == 0 and "but with it the answer on the example is" in str(moved.plan)
    assert torch.equal(moved(*example), slower(*example))
    floats = twofour.compile(model, example, graph=True, tokens=(1, 32))
    assert IN_INT8 not in floats.plan.account.rewrites and "attention:" not in str(floats.plan)


def test_attention_in_int8_is_for_as_many_keys_as_were_judged(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], faster_in_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = encoder
    fast = compiled(model, *example)
    monkeypatch.setattr(attention_int8, "MOST_OFF", 0.0)
    floats = compiled(model, *example)
    assert floats.plan.account.rewrites[IN_INT8] == 0 and "a head's answers on the example are off" in str(floats.plan)
    for length, alike in ((19, False), (20, True), (3, True)):
        ids, mask = torch.arange(2 * length).view(2, length) % 50, torch.ones(2, length)
        assert torch.equal(fast(ids, mask), floats(ids, mask)) == alike
        mask[1, length // 2 :] = 0  # packed
        assert torch.equal(fast(ids, mask), floats(ids, mask)) == alike


def test_queries_keys_and_values_are_bytes_of_any_length(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], faster_in_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = encoder
    data = [(torch.randint(0, 50, (4, 40)), torch.ones(4, 40))]
    example = data[0][0][:2, :19], torch.ones(SHAPE)
    fast = compiled(model, *example, data=data)
    assert "queries, keys and values are bytes by ranges of the data" in str(fast.plan)
    layers = twofour.compile(model, example, dtype="int8", graph=False, tokens=(1, 32), data=data)
    monkeypatch.setattr(attention_bytes, "MOST_OFF", 0.0)
    floats = compiled(model, *example, data=data)
    assert "queries, keys and values are bytes" not in str(floats.plan)
    for rows, length in ((2, 19), (1, 3), (3, 40)):
        given = torch.randint(0, 50, (rows, length)), torch.ones(rows, length)
        assert not torch.equal(fast(*given), floats(*given))
        layer_wise = distance([layers(*given)], [model(*given)])
        assert distance([fast(*given)], [model(*given)]) <= 1.5 * layer_wise + 2**-6


@pytest.mark.parametrize("group", [1, 3])
def test_bytes_of_heads_stand_for_their_scores_and_values(group: int) -> None:
    torch.manual_seed(0)
    width, heads = 16, 2
    q, k, v = (torch.randn(50, n * heads * width) for n in (group, 1, 1))
    k[:, 3] = 40 + 0.01 * k[:, 3]  # a column that is all but constant, far from 0
    q[:, 5] = 0
    q[:, 2], k[:, 2] = 30 * q[:, 2], k[:, 2] / 30  # columns whose product is like the others'
    ranged = Ranged.of(*(torch.stack(t.aminmax(dim=0)) for t in (q, k, v)), width, 0.25)
    whole = ranged.rounded((q, k, v))
    scores = [
        (a.unflatten(-1, (-1, width)).transpose(0, 1), b.unflatten(-1, (-1, width)).transpose(0, 1))
        for a, b in ((q, k - ranged.middles[1]), (whole[0].float() - 128, whole[1].float() - 128))
    ]
    want, got = (a @ b.repeat_interleave(group, 0).mT for a, b in scores)
    got *= (ranged.units / LOG2_E / 0.25)[:, None, None]
    assert (got - want).square().mean().sqrt() < 0.02 * want.square().mean().sqrt()
    assert ((whole[2].float() - 128) * ranged.steps[2] + ranged.middles[2] - v).abs().max() <= ranged.steps[2].max() / 2


def test_what_attention_in_int8_is_off_by() -> None:
    def off(keys: int, **options: Any) -> float | None:
        torch.manual_seed(0)
        q, k, v = torch.zeros(1, keys, 32), torch.zeros(1, keys, 32), torch.randn(1, keys, 32)
        q[..., 0], k[:, 0, 0] = 32**0.5, 6.6
        columns = (t.bfloat16() for t in (q, k, v))
        return off_in_int8(*columns, (0, 0, 0), (32, 32, 32), 32, **options)

    for keys in (8, 512):
        found = off(keys)
        assert found is not None and found < MOST_OFF, "one key stands so far above all others that a byte loses them"
    assert off(8, causal=True) is None and off(8, mask=torch.ones(8, 8, dtype=torch.bool)) is None
    assert off(8, mask=torch.ones(1, 1, 1, 8, dtype=torch.bool)) is not None


def test_attention_in_int8_starts_where_it_is_faster(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, example = encoder
    raced: list[int] = []

    def race(_: object) -> tuple[dict[str, float], float]:
        raced.append(0)
        return {"bfloat16": 2.0, "int8": 1.0 if len(raced) % 2 else 3.0}, 0.0  # the example's length, then less of it

    monkeypatch.setattr(attention_int8, "_raced", race)
    assert "of 19 keys, judged on" in str(compiled(model, *example).plan)


@pytest.mark.parametrize("calibrated", [True, False])
def test_attention_is_timed_on_what_it_will_read(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], own_cache: Path, monkeypatch: pytest.MonkeyPatch, calibrated: bool
) -> None:
    model, example = encoder
    read: list[tuple[str, torch.dtype, bool]] = []

    def race(kinds: dict[str, Callable[[], Tensor]]) -> tuple[dict[str, float], float]:
        with monkeypatch.context() as inside:
            for kind, run in kinds.items():
                note = lambda q, *_, kind=kind, steps=None, **__: read.append((kind, q.dtype, steps is not None))  # noqa: E731
                inside.setattr(attention_int8, "attention_of_columns", note)
                run()
            inside.undo()
            assert all(run().isfinite().all() for run in kinds.values())
        return {"bfloat16": 1.0, "int8": 2.0}, 0.0

    monkeypatch.setattr(attention_int8, "_raced", race)
    compiled(model, *example, **({"data": [example]} if calibrated else {}))
    own = ("int8", torch.uint8, True) if calibrated else ("int8", torch.bfloat16, False)
    assert set(read) == {("bfloat16", torch.bfloat16, False), own}


def test_attention_without_bytes_keeps_to_its_time_on_bfloat16(
    encoder: tuple[nn.Module, tuple[Tensor, Tensor]], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faster in int8 on bytes alone, and no head near enough in bytes: it stayed in int8, by a time that held not."""
    model, example = encoder

    def race(kinds: dict[str, Callable[[], Tensor]]) -> tuple[dict[str, float], float]:
        read: list[bool] = []
        with monkeypatch.context() as inside:
            inside.setattr(attention_int8, "attention_of_columns", lambda *_, **more: read.append("steps" in more))
            kinds["int8"]()
        return {"bfloat16": 1.0, "int8": 0.8 if read[0] else 1.5}, 0.0

    monkeypatch.setattr(attention_int8, "_raced", race)
    with monkeypatch.context() as patch:
        patch.setattr(attention_bytes, "MOST_OFF", 0.0)
        account = compiled(model, *example, data=[example]).plan.account
        assert not account.rewrites.get(IN_INT8), account.rewrites
        assert "in int8 takes 1.50 of the time" in account.attention, account.attention
    account = compiled(model, *example, data=[example]).plan.account
    assert account.rewrites[IN_INT8] == 2 and "takes 0.80 of the time" in account.attention, account.attention

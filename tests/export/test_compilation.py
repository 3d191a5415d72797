"""What a compiled model was made with goes into its file whole, whatever the model's class has of its own."""

from __future__ import annotations

import base64
import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import twofour
from twofour.compiler.compilation import Compilation, answers_of, compilation_of
from twofour.compiler.computing import Computing
from twofour.errors import FormatError
from twofour.kernels.nm_matmul import Quantization

names = st.text(min_size=1, max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    computing=st.builds(
        Computing,
        st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
        st.sampled_from([32, 64, 128]),
        st.booleans(),
    ),
    memory=st.sampled_from(["fast", "small"]),
    tokens=st.lists(st.integers(1, 9999), min_size=1, max_size=64).map(tuple),
    counts=st.dictionaries(names, st.integers(1, 999), max_size=3),
    images=st.dictionaries(names, st.tuples(*[st.integers(1, 99)] * 3), max_size=3),
    ranges=st.dictionaries(names, st.builds(Quantization, st.floats(1e-3, 9.0), st.integers(0, 255)), max_size=3),
    kept=st.lists(names, max_size=3).map(tuple),
)
def test_a_file_says_again_what_it_was_told(computing, memory, tokens, counts, images, ranges, kept) -> None:
    ranges = ranges if computing.dtype == "int8" else {}
    if computing.dtype != "int4":
        computing = Computing(computing.dtype)
    made = Compilation(computing, memory, tokens, counts, images, ranges, kept)
    assert Compilation.from_dict(made.to_dict(), "model.safetensors") == made


def test_token_counts_that_are_too_many_or_too_large_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for tokens in (tuple(range(1, 66)), (1, 1 << 20)):
        caplog.clear()
        found = Compilation.from_dict(Compilation(tokens=tokens).to_dict(), "model.safetensors")
        assert found.tokens == Compilation().tokens
        assert f"model.safetensors: its {len(tokens)} token counts are not measured" in caplog.text
    caplog.clear()
    Compilation.from_dict({"kind": "compiled"}, "model.safetensors")
    assert not caplog.text


def test_ranges_of_answers_that_are_none_are_left_out() -> None:
    ends = torch.tensor([[-1.0, 0.0], [2.0, 0.5]])
    text = base64.b64encode(ends.numpy().astype("<f4").tobytes()).decode()
    found = answers_of(text)
    assert found is not None and torch.equal(found, ends)
    turned = base64.b64encode(ends.flip(0).numpy().tobytes()).decode()
    for odd in (None, "", "!", text[:-4], turned, base64.b64encode((ends * torch.inf).numpy().tobytes()).decode()):
        assert answers_of(odd) is None


@given(st.dictionaries(st.sampled_from([*Compilation().to_dict(), "counts", "images", "ranges", "times"]), JSON))
def test_settings_of_strangers_are_advice(settings: dict) -> None:
    try:
        found = Compilation.from_dict(settings, "model.safetensors")
    except FormatError as error:
        assert error.code == "settings-range" and settings["dtype"] == "int8"
    else:
        assert found.memory in ("fast", "small") and all(0 < n < 1 << 20 for n in found.tokens)


class Planned(nn.Module):
    """A model with an attribute that is called as ours."""

    plan = "the user's"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(32, 32, 3), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean(-1))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_model_with_a_plan_of_its_own_keeps_its_settings(tmp_path: Path, dtype: str) -> None:
    model, x = twofour.prune(Planned(), "2:4"), torch.randn(4, 32, 9)
    fast = twofour.compile(model, x, dtype, memory="small", tokens=(3,), data=[x] if dtype == "int8" else None)
    assert fast.plan == "the user's"
    made = compilation_of(fast)
    assert made is not None and made == compilation_of(copy.deepcopy(fast)) and compilation_of(model) is None
    assert (made.memory, made.tokens, made.counts) == ("small", (3,), {"fc": 4})
    assert list(made.images) == ["conv"]
    assert list(made.ranges) == (["conv", "fc"] if dtype == "int8" else [])
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = compilation_of(twofour.load(tmp_path / "model.safetensors", Planned()))
    assert loaded is not None and loaded.to_dict() | {"times": []} == made.to_dict() | {"times": []}

"""Outliers before int8: found and smoothed where that helps; the model that was given stays as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.turns import in_turn
from twofour.compiler.computing import Computing
from twofour.compiler.smoothing import ALPHAS, _groups, smoothed
from twofour.errors import CompileError

INT8 = Computing.of("int8", "cpu")
WIDTH, WIDE = 64, (3, 17)


class RMS(nn.Module):
    """As models write it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    """Two layers behind a normalisation of which some gains are wide, as those of large decoders are."""

    def __init__(self, norm: type[nn.Module], *, behind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.behind = norm(WIDTH), behind
        self.first, self.second = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96, bias=False)
        self.last = nn.Linear(96, WIDTH)
        with torch.no_grad():
            self.norm.weight[list(WIDE)] *= 30  # type: ignore[operator,index]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y = self.last(torch.relu(self.first(normed)) * self.second(normed))
        return normed + y if self.behind else x + y


def batches(count: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 12, WIDTH, generator=generator) for _ in range(count)]


def off(fast: nn.Module, model: nn.Module) -> float:
    x = batches()[5]
    with torch.inference_mode():
        got, want = fast(x) - x, model(x) - x
    return float((got - want).norm() / want.norm())


def behind_the_norm(fast: Any, model: Any) -> float:
    x = batches()[5]
    with torch.inference_mode():
        got, want = fast.first(fast.norm(x)), model.first(model.norm(x))
    return float((got - want).norm() / want.norm())


@in_turn(("norm", "kind"), [(norm, kind) for norm in (nn.LayerNorm, RMS) for kind in ("dense", "2:4")])
def test_the_error_falls_and_the_model_stays(norm: type[nn.Module], kind: str) -> None:
    model = Block(norm).eval()
    model = twofour.prune(model, "2:4", criterion="magnitude") if kind == "2:4" else model
    before = copy.deepcopy(model.state_dict())
    rough = quick(model, batches()[0], dtype="int8", data=batches(), smooth=False)
    fine = quick(model, batches()[0], dtype="int8", data=batches(), smooth=True)
    assert off(fine, model) < 0.7 * off(rough, model), "what the last layer rounds is left"
    assert behind_the_norm(fine, model) < 0.4 * behind_the_norm(rough, model)
    (said,) = (note for note in fine.plan.notes if note.startswith("outliers smoothed"))
    assert "`norm` 0." in said and not any("outliers" in note for note in rough.plan.notes)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_a_smoothed_model_is_the_same_function_and_its_masks_hold() -> None:
    model = twofour.prune(Block(nn.LayerNorm).eval(), "2:4", criterion="magnitude")
    with torch.no_grad():
        found = smoothed(model, iter(batches()), INT8)
        assert found.model is not model and twofour.check(found.model).ok
        torch.testing.assert_close(found.model(batches()[0]), model(batches()[0]), atol=1e-4, rtol=1e-4)
    assert len(list(found.data or ())) == 24, "what was read of an iterator comes again"
    assert found.model.last.weight is model.last.weight, "what nothing was folded into is shared"
    wide = found.model.norm.weight / model.norm.weight  # type: ignore[operator]
    assert wide[list(WIDE)].max() < wide.median()


def test_scales_follow_equation_4() -> None:
    model = Block(nn.LayerNorm).eval()
    with torch.no_grad():
        (group,) = _groups(model, batches(), INT8)
    answers = torch.cat([model.norm(x).detach().flatten(0, -2) for x in batches()])
    weights = torch.cat([model.first.weight, model.second.weight]).detach()
    for alpha in ALPHAS:
        want = answers.abs().amax(0) ** alpha / weights.abs().amax(0) ** (1 - alpha)
        torch.testing.assert_close(group.scales(alpha), want)


def test_what_is_read_elsewhere_too_is_left() -> None:
    """A residual sum behind the normalisation, as BERT has it: its answer cannot be divided."""
    model = Block(nn.LayerNorm, behind=True).eval()
    fast = quick(model, batches()[0], dtype="int8", data=batches(), smooth=True)
    assert "outliers: not smoothed; left `norm`: its answer is read elsewhere too" in fast.plan.notes
    level = Block(nn.LayerNorm).eval()
    nn.init.ones_(level.norm.weight)
    notes = quick(level, batches()[0], dtype="int8", data=batches(), smooth="auto").plan.notes
    assert not any(note.startswith("outliers smoothed") for note in notes), "nothing is gained"


def test_files_hold_it(tmp_path: Path) -> None:
    model = Block(nn.LayerNorm).eval()
    fast = quick(model, batches()[0], dtype="int8", data=batches(), smooth=True)
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded = twofour.load(tmp_path / "model.safetensors", model)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(batches()[1]), fast(batches()[1]), atol=1e-3, rtol=1e-3)
    assert off(loaded, model) < 0.1


def test_it_is_asked_for() -> None:
    fast = quick(Block(nn.LayerNorm).eval(), batches()[0], dtype="int8", data=batches())
    assert not any("outliers" in note for note in fast.plan.notes)


@in_turn("options", [{"smooth": True}, {"smooth": True, "dtype": "int8"}, {"smooth": "always"}, {"smooth": 0.5}])
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match=r'(?s)smoothed so.*smooth=.*"auto", True or False'):
        quick(Block(nn.LayerNorm).eval(), batches()[0], **options)

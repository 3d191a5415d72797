"""torch.compile's wrapper is refused by every verb with the same words; training through it is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from twofour import export, masks
from twofour.errors import TwofourError


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


VERBS: dict[str, Callable[[nn.Module, Path], object]] = {
    "prune": lambda model, _: twofour.prune(model, "2:4"),
    "compile": lambda model, _: twofour.compile(model),
    "advise": lambda model, _: twofour.advise(model),
    "save": lambda model, folder: twofour.save(model, folder / "new.safetensors"),
    "load": lambda model, folder: twofour.load(folder / "m.safetensors", model),
    "load masked": lambda model, folder: twofour.load(folder / "m.safetensors", model, masked=True),
    "check": lambda model, _: twofour.check(model),
    "to_safetensors": lambda model, folder: export.to_safetensors(model, folder / "new.safetensors"),
    "to_huggingface": lambda model, folder: export.to_huggingface(model, folder / "new"),
}


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_wrapped_model_is_named_with_the_way_out(verb: str, part: bool, tmp_path: Path) -> None:
    model = _model() if verb == "prune" else twofour.prune(_model(), "2:4")
    twofour.save(model, tmp_path / "m.safetensors")
    wrapped = torch.compile(model, backend="eager")
    given = nn.Sequential(wrapped) if part else wrapped
    names = r"put its module back: model\.0 = model\.0\._orig_mod" if part else r"pass model\._orig_mod"
    with pytest.raises(TwofourError, match=rf"torch\.compile has wrapped [\s\S]*{names}"):
        VERBS[verb](given, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    if verb == "prune":
        assert not masks.of(model)


def test_a_wrapped_model_shares_its_module_and_trains() -> None:
    model = twofour.prune(_model(), "2:4")
    wrapped = torch.compile(model, backend="eager")
    assert wrapped._orig_mod is model and len(masks.of(wrapped)) == len(masks.of(model)) == 2
    pairs = [(torch.randn(4, 64), torch.randn(4, 64))]
    options = {"loss": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    twofour.finetune(wrapped, pairs, epochs=1, progress=False, **options)
    assert twofour.check(model).ok

"""apex ASP's checkpoints, as its documentation and source lay them out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.importing.small import INPUT, Net, net_state
from twofour import importing, masks
from twofour.errors import FormatError
from twofour.patterns import parse

SPARSE = ("conv.weight", "fc1.weight", "fc2.weight")


def asp_state(stowed: bool = False) -> dict[str, Tensor]:
    """State dict of a model that ASP pruned; `head` was refused for its size."""
    state = net_state()
    for name in SPARSE:
        layer, last = name.removesuffix(".weight"), state[name].movedim(1, -1)
        keep = parse("2:4").project(last + torch.randn(last.shape) * 1e-9, absolute=True).movedim(-1, 1)
        state[f"{layer}.__weight_mma_mask"] = keep
        if stowed:
            state[f"{layer}.__weight_mma_pruned_p"] = torch.randn(keep.shape) * ~keep
    return state


def written(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "part1.chkp")
    return tmp_path / "part1.chkp"


def test_weights_and_exact_masks_come_back(tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    state = asp_state()
    model = twofour.read(written(tmp_path, state), Net())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    kept = {name: mask.keep for name, mask in masks.of(model).items()}
    assert kept.keys() == set(SPARSE)
    assert all(torch.equal(kept[name], state[name.replace("weight", "__weight_mma_mask")]) for name in SPARSE)
    assert twofour.check(model).ok
    fast = twofour.compile(model.eval(), INPUT, tokens=(2,))
    torch.testing.assert_close(fast(INPUT), model(INPUT).detach(), atol=1e-4, rtol=1e-4)


def test_apexs_own_checkpoint_is_read_with_its_list_of_layer_types(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3))])
    content = {
        "step": 5000,
        "pattern": "m4n2_2d_best",
        "whitelist": [nn.Linear, nn.Conv2d],
        "allow_recompute_mask": True,
        "model_state_dict": asp_state(stowed=True),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    found = importing.decode(written(tmp_path, content))
    assert found.format == "asp" and set(found.sparse) == set(SPARSE) and "left out" in found.notes[-1]


def test_a_layer_type_is_never_made_into_a_layer(tmp_path: Path) -> None:
    class Large:
        def __reduce__(self) -> tuple[Any, tuple[int, int]]:
            return (nn.Linear, (1 << 20, 1 << 20))

    with pytest.raises(FormatError, match="objects of classes"):
        importing.decode(written(tmp_path, {"model": asp_state(), "x": Large()}))


def test_the_buffers_of_the_first_releases_are_known(tmp_path: Path) -> None:
    state = asp_state()
    state = {
        name.replace("fc1.__weight", "fc1.__fc1").replace("conv.__weight", "conv.__conv"): tensor
        for name, tensor in state.items()
    }
    assert set(importing.decode(written(tmp_path, state)).sparse) == set(SPARSE)


def test_the_prefix_of_data_parallel_is_taken_off(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in asp_state().items()}
    assert twofour.check(twofour.read(written(tmp_path, state), Net())).ok


def test_a_layer_whose_mask_keeps_everything_is_dense(tmp_path: Path) -> None:
    state = asp_state()
    state["fc2.__weight_mma_mask"] = torch.ones(128, 64, dtype=torch.bool)
    found = importing.decode(written(tmp_path, state))
    assert "fc2.weight" in found.plain and "fc2.weight" in found.notes[0]
    for name in ("conv", "fc1"):
        state[f"{name}.__weight_mma_mask"] = torch.ones_like(state[f"{name}.__weight_mma_mask"])
    with pytest.raises(FormatError, match="not sparse yet"):
        importing.decode(written(tmp_path, state))


DAMAGE = [
    ("fc1.weight", lambda t: t + 1, "where the mask has none"),
    ("fc1.weight", lambda t: t * float("inf"), "NaN"),
    ("fc1.weight", lambda t: t.to(torch.float8_e4m3fn), "bool mask"),
    ("fc1.weight", None, "a mask without"),
    ("fc1.__weight_mma_mask", lambda t: t.to(torch.uint8), "bool mask"),
    ("fc1.__weight_mma_mask", lambda t: t[:-8], "bool mask"),
    ("fc1.__weight_mma_mask", lambda t: t | torch.eye(64, 256, dtype=torch.bool), "groups break it"),
]


@pytest.mark.parametrize(("name", "change", "message"), DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str, change: Any, message: str) -> None:
    state = asp_state()
    tensor = state.pop(name)
    if change is not None:
        state[name] = change(tensor)
    with pytest.raises(FormatError, match=message):
        importing.decode(written(tmp_path, state))

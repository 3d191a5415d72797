"""A published CIFAR-10 checkpoint: its dense accuracy is reproduced, and 2:4 lands on its input channels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import twofour
from twofour import masks
from twofour.demo.resnet import ResNet20, normalise

CHECKPOINT = "pretrained/resnet20-12fca82f.safetensors"
STEM = "conv1.weight"


@pytest.fixture(scope="module")
def checkpoint(data_dir: Path) -> dict[str, Tensor]:
    path = data_dir / CHECKPOINT
    if not path.is_file():
        pytest.skip(f"no {path}")
    return load_file(path)


@pytest.fixture(scope="module")
def test_images(data_dir: Path) -> tuple[Tensor, Tensor]:
    path = data_dir / "cifar10" / "test.npz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    with np.load(path, allow_pickle=False) as file:
        # Two-dimensional differences of the planes G, R - G, B - G, modulo 256 (the folder's README).
        planes = file["residual"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        labels = torch.from_numpy(file["labels"].astype(np.int64))
    pixels = np.stack([planes[1] + planes[0], planes[0], planes[2] + planes[0]], -1)
    return normalise(torch.from_numpy(pixels)), labels


def resnet20(state: dict[str, Tensor]) -> nn.Module:
    model = ResNet20()
    model.load_state_dict(state)
    return model.eval()


def right_answers(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    model = model.to(memory_format=torch.channels_last)
    with torch.inference_mode():
        parts = zip(images.split(500), labels.split(500), strict=True)
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)


@pytest.mark.long
def test_dense_accuracy_is_the_published_one_and_one_shot_is_printed(checkpoint, test_images, capsys):
    assert test_images[0].shape == (10_000, 3, 32, 32)
    dense = right_answers(resnet20(checkpoint), *test_images)
    sparse = right_answers(twofour.prune(resnet20(checkpoint), "2:4"), *test_images)
    with capsys.disabled():
        print(f"\nresnet20, CIFAR-10, 10,000 test images: dense {dense / 100:.2f} %, one-shot 2:4 {sparse / 100:.2f} %")
    assert dense == 9_173
    assert 5_000 < sparse < dense


def test_convolutions_are_masked_along_input_channels(checkpoint):
    model = twofour.prune(resnet20(checkpoint), "2:4")
    found = masks.of(model)
    convolutions = {name for name, p in model.named_parameters() if p.ndim == 4}
    assert set(found) == convolutions - {STEM}  # the stem has 3 input channels, the classifier 10 outputs: both dense
    assert len(found) == 18
    for name, mask in found.items():
        outputs, inputs, height, width = mask.keep.shape
        groups = mask.keep.permute(0, 2, 3, 1).reshape(outputs, height, width, inputs // 4, 4)
        assert (groups.sum(-1) == 2).all()
        magnitude = checkpoint[name].abs().permute(0, 2, 3, 1).reshape(groups.shape)
        assert (magnitude.masked_fill(~groups, torch.inf).amin(-1) >= magnitude.masked_fill(groups, 0).amax(-1)).all()
        assert torch.equal(model.get_parameter(name), checkpoint[name] * mask.keep)
    assert torch.equal(model.conv1.weight, checkpoint[STEM])
    assert torch.equal(model.linear.weight, checkpoint["linear.weight"])


@pytest.mark.long
def test_compiling_keeps_the_accuracy(checkpoint, test_images, capsys, times_cache, monkeypatch):
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    model = twofour.prune(resnet20(checkpoint), "2:4")
    fast = twofour.compile(model, test_images[0][:16], tokens=(16,), memory="small")
    layers = {layer.name: layer for layer in fast.plan.layers if layer.kind == "Conv2d"}
    assert len(layers) == 19
    assert sum(layer.sparse for layer in layers.values()) == 18
    images, labels = (part[:1000] for part in test_images)
    before, after = (right_answers(m, images, labels) for m in (model, fast))
    with capsys.disabled():
        print(f"\nresnet20, one-shot 2:4, 1,000 test images: {before / 10:.1f} %, compiled {after / 10:.1f} %")
    assert abs(before - after) <= 1  # a sum in another order may turn a tie

"""Nets of few bits that a GPU trained, answering here: held to whole numbers and compiled kernels, kept as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import twofour
from low_bit_nets import FLOAT, Evaluate, require_whole
from records import SAME, Brought, version
from tasks import CONVNETS, ConvNet
from twofour.errors import DataError


def brought(folder: Path) -> list[dict[str, Any]]:
    """Return what `gpu_low_bits.py` wrote of the trainings after the first, by task, seed and arm.

    Raises:
        DataError: There is none, or one of another task.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    found = [{"recipe": SAME} | one for one in found if one["arm"] != "start"]
    unknown = sorted({one["task"] for one in found} - set(CONVNETS))
    if unknown or not found:
        raise DataError(
            "there is nothing that was trained on a GPU",
            got=unknown[0] if unknown else f"no such JSON file in {folder}",
            wanted=f"files of {', '.join(CONVNETS)}",
            remedy="python experiments/gpu_low_bits.py FOLDER, where there is a GPU",
        )
    return sorted(found, key=lambda one: (one["task"], one["seed"], one["arm"]))


ALIKE = ("epochs", "start_epochs", "taught", "images", "batch", "recipe", "device")
"""What all rows of a task have in common: else they do not compare."""


def require_alike(found: list[dict[str, Any]], kept: Iterable[Brought]) -> None:
    """Refuse nets of one task that were not trained alike, or not as those that a record has.

    Raises:
        DataError: Epochs, teacher, images, batch, recipe or device differ.
    """
    ways = {tuple(getattr(row, name) for name in ALIKE) for row in kept}
    ways |= {tuple(_device(one) if name == "device" else one[name] for name in ALIKE) for one in found}
    if len(ways) > 1:
        raise DataError(
            "nets that were not trained alike do not compare",
            got="; ".join(", ".join(map(str, way)) for way in sorted(ways, key=str)),
            wanted=f"one of each: {', '.join(ALIKE)}",
            remedy="keep them in folders of their own, and move the record away",
        )


def _device(found: dict[str, Any]) -> str:
    return str((found["gpu"] or {}).get("name") or found["machine"]["cpu"])


def rows(folder: Path, found: list[dict[str, Any]], evaluate: Evaluate, whole: int) -> Iterator[Brought]:
    """Yield the row of each net of one task.

    Args:
        folder: Where its state is.
        found: Of one task, from `brought`.
        evaluate: Returns the metric of a model.
        whole: Test images that 64-bit whole numbers answer.

    Raises:
        TrainingError: An answer of whole numbers or of compiled kernels has other bits than the model's.
        DataError: A net was a trial, measured on some images.
    """
    for one in found:
        task = CONVNETS[one["task"]]()
        if one["metric"] != (wanted := asdict(task.metric)):
            raise DataError(
                "a net was measured otherwise",
                got=f"{one['metric']['held_out']} {one['metric']['of']}, {one['task']} {one['arm']} seed {one['seed']}",
                wanted=f"{wanted['held_out']} {wanted['of']}",
                remedy="train it without --held",
            )
        yield _row(task, folder, one, evaluate, whole)


def laid_out(model: nn.Module) -> nn.Module:
    """Let a net compute in channels_last behind its first convolution, as compiled ones do; returns it.

    A mean over places adds them up in the order of memory, and its last bit decides a level of the classifier now and
    then. Images of one channel are laid out both ways: so it is said behind them, to the normalisation.
    """
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda _, args: (args[0].contiguous(memory_format=torch.channels_last),))
    return model


def _row(task: ConvNet, folder: Path, found: dict[str, Any], evaluate: Evaluate, whole: int) -> Brought:
    value, examples = found["value"], (0, 0)
    if found["arm"] != FLOAT:
        path = folder / f"{found['task']}-{found['arm']}-{found['seed']}.safetensors"
        model = laid_out(twofour.load(path, task.network(0), masked=True))
        value = require_whole(task, model, evaluate, task.evaluate_first(whole))
        examples = len(task.test[1]), min(whole, len(task.test[1]))
    return Brought(
        found["arm"],
        found["seed"],
        found["dense"],
        found["one_shot"],
        value,
        found["seconds"],
        found["epochs"],
        version(),
        start_epochs=found["start_epochs"],
        taught=found["taught"],
        images=found["images"],
        batch=found["batch"],
        recipe=found["recipe"],
        device=_device(found),
        there=found["value"],
        answers=examples[0],
        whole=examples[1],
    )

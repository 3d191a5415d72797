"""Nets of 1 and 2 bits, trained from a trained float net, beside that net trained again for as long."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import twofour
from records import Row, version
from tasks import Task
from twofour import quantization
from twofour.errors import TrainingError

ARMS: dict[str, tuple[str, str] | None] = {
    "float": None,
    "w1a1": ("w1", "a1"),
    "w1a2": ("w1", "a2"),
    "w2a2": ("w2", "a2"),
}
"""Key of a row -> widths of weights and inputs; None: the control, trained again in floats."""

Evaluate = Callable[[Task, nn.Module], float]
Train = Callable[[Task, nn.Module, int, str], float]


def measured(task: Task, model: nn.Module, key: str, seed: int, evaluate: Evaluate, train: Train) -> Row:
    """Train one net again, in low bits or in floats.

    Args:
        task: What is learned.
        model: The trained float net; it is changed.
        key: One of `ARMS`.
        seed: Of the batches.
        evaluate: Returns the metric of a model.
        train: Trains a model again and returns its metric.

    Returns:
        The row; its `one_shot` is the metric right after rounding.

    Raises:
        TrainingError: The whole-number answer of a test image differs from the trained model's.
    """
    widths, dense = ARMS[key], evaluate(task, model)
    begin = time.perf_counter()
    one_shot = dense
    if widths is not None:
        twofour.quantize(model, *widths, data=task.calibration(), samples=1000)
        one_shot = evaluate(task, model)
    value = train(task, model, seed, key)
    seconds = time.perf_counter() - begin
    if widths is not None:
        _require_whole(task, model, value, evaluate)
    return Row(key, seed, dense, one_shot, value, seconds, task.epochs, version())


def _require_whole(task: Task, model: nn.Module, value: float, evaluate: Evaluate) -> None:
    """Hold answers to those of 64-bit whole numbers: on the example to the bit, on all data by the metric."""
    x = task.example()
    with torch.no_grad():
        answer = model.eval()(x)
    with quantization.in_whole_numbers(model):
        whole, found = model(x), evaluate(task, model)
    if not torch.equal(answer, whole) or found != value:
        raise TrainingError(
            "whole numbers answer otherwise than the model",
            got=f"{found} for {value}, largest difference {(answer - whole).abs().max().item()} on the example",
            wanted="the same",
            remedy="please report it",
        )

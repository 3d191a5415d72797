"""Nets of few bits, trained from a trained float net, beside that net trained again for as long."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import twofour
from records import Row, version
from tasks import Task
from twofour import quantization
from twofour.errors import TrainingError


@dataclass(frozen=True)
class Arm:
    """One row.

    Attributes:
        weights: Their width.
        inputs: Theirs.
        learned: Whether inputs have one learned step, found on calibration data; else each token has its own range.
    """

    weights: str
    inputs: str
    learned: bool = True


FLOAT = "float"

ARMS: dict[str, Arm | None] = {
    FLOAT: None,
    "w1a1": Arm("w1", "a1"),
    "w1a2": Arm("w1", "a2"),
    "w2a2": Arm("w2", "a2"),
    "w1.58a8": Arm("w1.58", "a8", learned=False),
}
"""Key of a row -> what is computed in; None: the control, trained again in floats. Ternary weights and a range of 8
bits for each token are those of BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764, section 2)."""

Evaluate = Callable[[Task, nn.Module], float]
Train = Callable[[Task, nn.Module, int, str], float]


def measured(task: Task, model: nn.Module, key: str, seed: int, dense: float, evaluate: Evaluate, train: Train) -> Row:
    """Train one net again, in low bits or in floats.

    Args:
        task: What is learned.
        model: The trained float net; it is changed.
        key: One of `ARMS`.
        seed: Of the batches.
        dense: The metric of the float net.
        evaluate: Returns the metric of a model.
        train: Trains a model again and returns its metric.

    Returns:
        The row; its `one_shot` is the metric right after rounding.

    Raises:
        TrainingError: An answer of whole numbers, or of the compiled model, to a test image differs from the trained
            model's.
    """
    arm = ARMS[key]
    begin = time.perf_counter()
    one_shot = dense
    if arm is not None:
        data = task.calibration() if arm.learned else None
        twofour.quantize(model.eval(), arm.weights, arm.inputs, data=data, samples=1000)
        one_shot = evaluate(task, model)
    value = train(task, model, seed, key)
    seconds = time.perf_counter() - begin
    if arm is not None:
        require_whole(task, model, evaluate, value=value)
    return Row(key, seed, dense, one_shot, value, seconds, task.epochs, version())


def require_whole(
    task: Task, model: nn.Module, evaluate: Evaluate, part: Evaluate | None = None, *, value: float | None = None
) -> float:
    """Hold all answers that the metric is of to those of 64-bit whole numbers and of compiled kernels, to the bit.

    Compiled layer by layer: a graph rounds otherwise what stands between the layers.

    Args:
        task: What is learned.
        model: The trained net of few bits.
        evaluate: Returns the metric of a model.
        part: Makes the first of its calls alone: all that 64-bit whole numbers answer, which are slow in large nets.
        value: The metric that must come out, where it is known.

    Returns:
        The metric.

    Raises:
        TrainingError: A metric or an answer differs.
    """
    found, want = _answers(task, model.eval(), evaluate)
    value = found if value is None else value
    _require_same("the model again", (found, want), value, want)
    fast = twofour.compile(copy.deepcopy(model), task.example(), graph=False, effort="quick", progress=False)
    with quantization.in_whole_numbers(model):
        found, answers = _answers(task, model, part or evaluate)
    _require_same("whole numbers", (found if part is None else value, answers), value, want[: len(answers)])
    _require_same("compiled kernels", _answers(task, fast, evaluate), value, want)
    return value


def _require_same(what: str, found: tuple[float, list[bytes]], value: float, want: list[bytes]) -> None:
    metric, answers = found
    if answers == want and answers and metric == value:
        return
    unlike = sum(one != other for one, other in zip(answers, want, strict=False))
    raise TrainingError(
        f"{what} answer otherwise than the model",
        got=f"{metric} for {value}, {unlike} of {len(want)} calls with other bits",
        wanted=f"the same answers, and {value}",
        remedy="please report it",
    )


def _answers(task: Task, model: nn.Module, evaluate: Evaluate) -> tuple[float, list[bytes]]:
    """Return the metric of a model, and a digest of all that it answered to each call: language models answer much."""
    digests: list[bytes] = []

    def note(_: nn.Module, __: object, answer: object) -> None:
        digest = hashlib.sha256()
        for leaf in tree_leaves(answer):
            if isinstance(leaf, torch.Tensor):
                digest.update(
                    (leaf.detach().cpu() + 0).contiguous().view(torch.uint8).numpy().tobytes()
                )  # no zero has a sign
        digests.append(digest.digest())

    handle = model.register_forward_hook(note)
    try:
        return evaluate(task, model), digests
    finally:
        handle.remove()

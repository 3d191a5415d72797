"""An encoder with half of its parameters, cut once and taught by the large one, beside that one trained as long."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import twofour
from records import SCRATCH, Shrunk, version
from tasks.minilm import Embedder
from tasks.stsb import Stsb
from twofour import shrinking, training
from twofour.errors import DataError
from twofour.training import Hidden, Taught, distilled

TAUGHT = {"distilled": False, "distilled, layers too": True}
"""Key of a row -> whether the teacher's layers teach too, beside its vectors."""
ARMS = ("dense", "cut", *TAUGHT)
GOAL = 1.0
"""Points below the control, at most."""
SHARE = 0.5
"""Of the parameters of the encoder's layers that stays; embeddings and pooler are whole."""
RATE = 1e-4
"""Learning rate of the small model: it has further to go than the large one, whose rate is the task's."""
SAVED = 30
"""Steps of a training after which its state is kept, so that a stopped run goes on."""


def arms(task: Stsb) -> tuple[str, ...]:
    """Return the keys of a task's rows."""
    return ARMS


def measured(task: Stsb, seed: int, kept: Container[str] = ()) -> Iterable[Shrunk]:
    """Yield the rows of one seed but those that are kept; a training that was stopped goes on.

    Every small model is taught by the large one that was trained on the same batches, its control.
    """
    begin = time.perf_counter()
    large = task.network(seed)
    _train(task, large, seed, "dense")
    if "dense" not in kept:
        yield _row(task, large, seed, "dense", begin)
    begin = time.perf_counter()
    small = smaller(task, seed)
    if "cut" not in kept:
        yield _row(task, small, seed, "cut", begin)
    cutting = time.perf_counter() - begin
    for key, layers in TAUGHT.items():
        if key not in kept:
            begin = time.perf_counter() - cutting
            model = copy.deepcopy(small)
            with Hidden(model, _layers(model)) as hidden:
                _train(task, model, seed, key.partition(",")[0] + layers * "-layers", large, hidden if layers else None)
            yield _row(task, model, seed, key, begin)


def smaller(task: Stsb, seed: int, share: float = SHARE) -> nn.Module:
    """Return the published model with a share of the parameters of its layers, in widths that its configuration says.

    Raises:
        DataError: The configuration does not say them, so that `from_pretrained` could not load the model.
    """
    net = task.network(seed)
    assert isinstance(net, Embedder)
    names = "input_ids", "attention_mask"
    data = [dict(zip(names, pair, strict=True)) for pair in task.calibration()]
    whole = sum(parameter.numel() for parameter in net.encoder.parameters())
    budget = 1 - (1 - share) * layers_size(net) / whole
    count = sum(len(batch["input_ids"]) for batch in data)
    given = {"data": data, "samples": count, "uniform": True, "progress": False}
    small = twofour.shrink(net.encoder, dict(zip(names, task.example(), strict=True)), budget, **given)
    report = shrinking.report_of(small)
    if report is None or report.config:
        raise DataError("the small model has no configuration that says its sizes", got=report and report.config)
    return Embedder(small)


def layers_size(net: nn.Module) -> int:
    """Return the number of parameters of the encoder's layers."""
    assert isinstance(net, Embedder)
    return sum(parameter.numel() for parameter in net.encoder.get_submodule("encoder").parameters())


def _layers(net: nn.Module) -> list[str]:
    """Return the names of the encoder's layers, whose outputs are as wide in both."""
    return [name for name, _ in net.named_modules() if re.fullmatch(r"encoder\.encoder\.layer\.\d+", name)]


def vectors(output: Tensor) -> Tensor:
    """Return unit vectors (sentences, width) so that the mean square of two differences is the square of a distance."""
    return output * output.shape[-1] ** 0.5


def _train(
    task: Stsb,
    model: nn.Module,
    seed: int,
    name: str,
    teacher: nn.Module | None = None,
    hidden: Hidden | None = None,
) -> None:
    """Train on the batches of a seed, with a teacher beside the scores."""
    loader, loss, optimizer = task.loader(seed), task.loss, task.optimizer
    if teacher is not None:
        layers = () if hidden is None else hidden.layers
        loader, optimizer = Taught(loader, teacher, answer=vectors, layers=layers), _adamw
        loss = distilled(task.loss, kind="values", answer=vectors, hidden=hidden)
    training.train(
        model,
        loader,
        loss=loss,
        optimizer=optimizer,
        schedule=task.schedule,
        epochs=task.epochs,
        seed=seed,
        clip_norm=1.0,
        name=name,
        progress=False,
        checkpoint=SCRATCH / f"{task.name}-{task.epochs}-epochs-seed-{seed}",
        checkpoint_every=SAVED,
    )


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=RATE, weight_decay=0.01)


def _row(task: Stsb, model: nn.Module, seed: int, key: str, begin: float) -> Shrunk:
    found = shrinking.report_of(model.encoder) if isinstance(model, Embedder) else None
    widths = {width.name: [width.before, width.after] for width in found.widths} if found and key == "cut" else {}
    seconds = time.perf_counter() - begin
    model.eval()
    with torch.inference_mode():
        value = task.evaluate(model)
    epochs = 0 if key == "cut" else task.epochs
    return Shrunk(key, seed, value, layers_size(model), widths, [], seconds, epochs, version())

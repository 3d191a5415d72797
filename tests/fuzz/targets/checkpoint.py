"""Checkpoints of a training run: read, and a run continued from them."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import twofour
from tests.fuzz.archive import Entries, edit_archive, edit_opcodes, entries_of, opcodes, zipped
from tests.fuzz.cursor import Cursor
from tests.fuzz.shelf import put, shelf
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import checkpoint
from twofour.training.trainee import Trainee

TRACED = ("twofour.training", "twofour.files", "twofour.masks.checkpoint")
SEEDS = (b"",)


@cache
def model() -> nn.Module:
    """Return the model that is trained, its values put back by every checkpoint that is read whole."""
    torch.manual_seed(0)
    return twofour.prune(nn.Sequential(nn.Linear(8, 4, bias=False)), "2:4", eligibility="any")


def trainee() -> Trainee:
    """Return a run at its first step."""
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return Trainee("sparse", model(), optimizer, schedule, {"name": "sparse", "epochs": 3}, shelf() / "run.pt")


@cache
def good() -> tuple[Entries, tuple[bytes, ...]]:
    """Return the entries of a good checkpoint, and the opcodes of its pickle."""
    run = trainee()
    model()(torch.ones(2, 8)).sum().backward()
    run.optimizer.step()
    run.step = 1
    run.save()
    held = entries_of((shelf() / "run.pt").read_bytes())
    return held, tuple(opcodes(next(content for name, content in held if name.endswith("data.pkl"))))


def build(data: bytes) -> bytes:
    """Return the file."""
    cursor = Cursor(data)
    held, program = list(good()[0]), list(good()[1])
    for _ in range(6):
        if cursor.empty:
            break
        if cursor.number(2):
            edit_opcodes(cursor, program)
        elif (found := edit_archive(cursor, held)) is not None:
            return found
    return zipped([(name, b"".join(program) if name.endswith("data.pkl") else of) for name, of in held])


def run(built: bytes) -> str:
    """Continue from it; a run that continues can take a step, and stays sparse."""
    state = checkpoint.read(put("run.pt", built))
    assert state is not None
    going = trainee()
    before = [parameter.detach().clone() for parameter in model().parameters()]
    try:
        going.resume(state)
    except TrainingError:
        pairs = zip(before, model().parameters(), strict=True)
        same = all(torch.equal(a.view(torch.uint8), b.detach().view(torch.uint8)) for a, b in pairs)  # NaN included
        assert same, "a refused checkpoint changed the model"
        raise
    for parameter in model().parameters():
        parameter.grad = torch.zeros_like(parameter)
    going.optimizer.step()
    assert all(not mask.module.weight[~mask.keep].any() for mask in masks.of(model()).values())
    return "resumed"

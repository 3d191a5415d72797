"""Models for the command line, and what a refused command looks like."""

from typer.testing import Result

ZOO = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))

def tied():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].weight = net[0].weight
    return net

def number():
    return 3

def broken():
    raise RuntimeError("no weights here")
"""


def refused(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert not result.stdout
    for text in texts:
        assert text in result.stderr

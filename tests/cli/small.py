"""Models for the command line, and what a refused command looks like."""

from typer.testing import Result

ZOO = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))

def coded():
    import twofour
    return twofour.quantize(small(), {"3": "float", "*": "w2"}, "a8", ends=None)

def tied():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].weight = net[0].weight
    return net

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Embedding(9, 16))
        self.add_module("1", nn.LSTM(16, 16, batch_first=True))
        self.add_module("2", nn.Linear(16, 8))

    def forward(self, ids):
        return self.get_submodule("2")(self.get_submodule("1")(self.get_submodule("0")(ids))[0])

def tagger():
    return Tagger().eval()

def ids():
    return [torch.zeros(2, 6, dtype=torch.int64)]

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

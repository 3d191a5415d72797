"""One small layer of each kind, and the class by which Hugging Face's Conv1D is known."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """As transformers.pytorch_utils writes it: y = x @ weight + bias, weight (in, out)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Make = Callable[[], nn.Module]

# Kind -> a layer, an input of one sample, and the weights that a walk finds in it.
LAYERS: dict[str, tuple[Make, tuple[int, ...], list[str]]] = {
    "linear": (lambda: nn.Linear(16, 8), (1, 16), ["weight"]),
    "hf_conv1d": (lambda: Conv1D(8, 16), (1, 16), ["weight"]),
    "conv1d": (lambda: nn.Conv1d(32, 8, 3, groups=2), (1, 32, 4), ["weight"]),
    "conv2d": (lambda: nn.Conv2d(16, 8, 2), (1, 16, 3, 3), ["weight"]),
    "conv3d": (lambda: nn.Conv3d(16, 8, 2), (1, 16, 2, 3, 2), ["weight"]),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(32, 16, 3, groups=2), (1, 32, 3), ["weight"]),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(16, 8, 2, stride=2), (1, 16, 2, 2), ["weight"]),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(16, 8, 2), (1, 16, 2, 1, 2), ["weight"]),
}


def lstm() -> nn.LSTM:
    return nn.LSTM(16, 32, num_layers=2, bidirectional=True, proj_size=16)


RECURRENT: dict[str, Make] = {
    "lstm": lstm,
    "gru": lambda: nn.GRU(16, 16, num_layers=2),
    "rnn": lambda: nn.RNN(16, 16),
    "lstm_cell": lambda: nn.LSTMCell(16, 16),
    "gru_cell": lambda: nn.GRUCell(16, 16),
    "rnn_cell": lambda: nn.RNNCell(16, 16),
}

ATTENTION: dict[str, Make] = {
    "fused": lambda: nn.MultiheadAttention(16, 1, batch_first=True),
    "separate": lambda: nn.MultiheadAttention(16, 1, kdim=32, vdim=48, batch_first=True),
}

EVERY: dict[str, Make] = {**{kind: make for kind, (make, _, _) in LAYERS.items()}, **RECURRENT, **ATTENTION}

"""Small layers under a rule that prunes their gradients, and what it leaves of these."""

import torch
from torch import Tensor, nn

from twofour.layers import CARRIED
from twofour.training import sdgp
from twofour.training.sdgp.convolution import prune

PRODUCTS = ("auto", "sparse", "dense")
LAYERS = {
    "linear": (lambda: nn.Linear(12, 24), (5, 12)),
    "linear, samples": (lambda: nn.Linear(20, 68, bias=False), (2, 3, 7, 20)),
    "1 x 1": (lambda: nn.Conv2d(6, 16, 1), (2, 6, 7, 5)),
    "3 x 3": (lambda: nn.Conv2d(6, 16, 3, padding=1), (2, 6, 7, 5)),
    "3 x 2, strided, dilated": (lambda: nn.Conv2d(6, 16, (3, 2), (2, 1), (1, 2), (1, 2)), (2, 6, 7, 5)),
    "5 x 1": (lambda: nn.Conv1d(6, 16, 5, 3, 4), (2, 6, 11)),
}
"""Convolutions all have 16 outputs."""


def attached(layer: nn.Module, **options) -> sdgp.Handle:
    return sdgp.attach(layer, options.pop("pattern", "2:4"), seconds=1e-3, **options)


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    dz = torch.randn(layer(x).shape)
    if isinstance(layer, nn.Conv2d):
        x, dz = (t.contiguous(memory_format=torch.channels_last) for t in (x, dz))
    return layer, x, dz


def gradients(layer: nn.Module, x: Tensor, dz: Tensor) -> list[Tensor]:
    """Gradients of input, weight and bias."""
    x = x.detach().clone().requires_grad_()
    return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], dz))


def chosen(layer: nn.Module, dz: Tensor) -> Tensor:
    """dL/dz as the next backward pass will prune it."""
    products = layer.__dict__[CARRIED]
    source = products.sources["data"]
    if not isinstance(layer, nn.Linear):
        whole = dz if dz.ndim == layer.weight.ndim else dz.unsqueeze(0)
        result = prune(whole, products.number).view(dz.shape)
    else:
        result = source.prune(dz.reshape(-1, *dz.shape[-2:])).view(dz.shape)
    source.draws = 0
    return result

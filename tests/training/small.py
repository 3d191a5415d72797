"""A small masked model and its data, for the tests of the training loop."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from twofour.pruning import prune

CLASSES = 4
WIDTH = 16


class Noisy(Dataset):
    """Rows with noise drawn from all three global generators, as an augmentation would."""

    def __init__(self, rows: int = 48, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, WIDTH, generator=generator)
        self.y = (self.x[:, :CLASSES]).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(WIDTH) + float(np.random.rand()) + random.random()
        return self.x[index] + 0.01 * noise, self.y[index]


def dense_model(seed: int = 0, dropout: float = 0.1) -> nn.Sequential:
    """Two linear layers, dropout and batch norm between them: state of every kind a checkpoint must keep."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)
        )


def pair_of_models(seed: int = 0, dropout: float = 0.1) -> tuple[nn.Module, nn.Module]:
    """A pruned model, every linear layer masked, and the dense one it came from."""
    control = dense_model(seed, dropout)
    return prune(copy.deepcopy(control), "2:4", eligibility="any"), control


def noisy_loader(own_generator: bool = False, batch: int = 8, workers: int = 0) -> DataLoader:
    """A shuffling loader, with a generator of its own or drawing its order from the global one."""
    generator = torch.Generator().manual_seed(11) if own_generator else None
    return DataLoader(Noisy(), batch, shuffle=True, generator=generator, num_workers=workers)


def recipe(epochs: int = 2, steps: int = 6) -> dict:
    """Loss, optimiser and schedule of the original training."""
    return {
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
        "schedule": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=epochs * steps),
        "epochs": epochs,
        "progress": False,
    }


def accuracy(model: nn.Module) -> float:
    """Share of clean rows answered right."""
    data = Noisy()
    return float((model(data.x).argmax(1) == data.y).float().mean())


def same_state(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters and buffers are the same bits."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

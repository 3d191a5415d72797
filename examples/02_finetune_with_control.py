"""The paper's workflow in one call: repeat the training, sparse and dense, and compare like with like."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import twofour

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=100, shuffle=True)

dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
recipe = {
    "loss": nn.functional.cross_entropy,
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "schedule": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=14 * 8),
    "epochs": 8,
}


def accuracy(model: nn.Module) -> float:
    """Return the percentage of test digits that are recognised."""
    return 100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()


twofour.training.train(dense, loader, **recipe)
sparse = twofour.prune(copy.deepcopy(dense), "2:4")
result = twofour.finetune(sparse, loader, **recipe, evaluate=accuracy, control=dense)
print(result)

"""Masks that torchao 0.18.0 chooses, committed beside this file as torchao.safetensors.

Needs an environment with torchao 0.18.0 and torch; run `python make.py` in this folder.
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.sparsity import WandaSparsifier, apply_fake_sparsity

if __name__ == "__main__":
    torch.manual_seed(11)
    weight, inputs = torch.randn(16, 32), torch.randn(3, 8, 32) * torch.rand(32) ** 2
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    model[0].weight.data.copy_(weight)
    apply_fake_sparsity(model)
    magnitude = model[0].weight.detach().ne(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    model[0].weight.data.copy_(weight)
    sparsifier = WandaSparsifier(semi_structured_block_size=4)
    sparsifier.prepare(model, config=None)
    for batch in inputs:
        model(batch)
    sparsifier.step()
    sparsifier.squash_mask()
    wanda = model[0].weight.detach().ne(0)
    tensors = {"weight": weight, "inputs": inputs, "magnitude": magnitude, "wanda": wanda}
    versions = {name: version(name) for name in ("torchao", "torch")}
    save_file(tensors, Path(__file__).parent / "torchao.safetensors", metadata=versions)

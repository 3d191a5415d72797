"""Save a sparse model packed, load it without dense weights in memory, and load it back for more training."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import twofour


def build() -> nn.Module:
    """Build the network; its weights do not matter where a file fills them."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))


torch.manual_seed(0)
model = twofour.prune(build(), "2:4")
x = torch.randn(4, 256)

with tempfile.TemporaryDirectory() as folder:
    packed, plain = Path(folder, "packed.safetensors"), Path(folder, "plain.safetensors")
    twofour.save(model, packed)
    twofour.save(model, plain, packed=False)
    print(f"plain {plain.stat().st_size:,} bytes, packed {packed.stat().st_size:,} bytes")

    with torch.device("meta"):  # shapes only
        empty = build()
    fast = twofour.load(packed, empty, memory="small", tokens=(4,))
    trainable = twofour.load(packed, build(), masked=True)

torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)
assert torch.equal(trainable(x), model(x))
assert twofour.check(trainable).ok
print(fast.plan)

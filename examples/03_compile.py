"""Compile a pruned model for this CPU, read the plan, and measure it against the dense model compiled the same way."""

import torch
from torch import nn

import twofour

torch.manual_seed(0)
dense = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).eval()
example = torch.randn(64, 512)

best_dense = twofour.compile(dense, example, tokens=(64,))
sparse = twofour.prune(dense, "2:4")
fast = twofour.compile(sparse, example, tokens=(1, 64))
print(fast.plan)

with torch.inference_mode():
    record = twofour.measure.compare(
        {
            "F.linear": lambda: sparse(example),
            "best dense": lambda: best_dense(example),
            "twofour": lambda: fast(example),
        },
        baseline=["F.linear", "best dense"],
        seconds=1.0,
    )
for name in record.timings:
    print(f"{name:<12} {record.median(name) * 1e3:.3f} ms")
print(f"best dense over ours: {record.ratio('twofour'):.2f}")

"""One level down: mask, pack, multiply. What prune, save and compile are made of."""

import torch

import twofour

weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
pattern = twofour.patterns.parse("2:4")

mask = pattern.project(weight, absolute=True)
assert pattern.check(weight * mask).ok
kept = (weight * mask).abs().sum() / weight.abs().sum()
print(f"2:4 keeps {mask.float().mean():.0%} of the values and {kept:.0%} of the magnitude")

packed = twofour.packing.pack(weight * mask, "2:4")
print(f"{weight.nbytes} bytes dense, {packed.nbytes} bytes packed ({packed.header})")
assert torch.equal(packed.unpack(), weight * mask)

x = torch.randn(3, 16)
y = twofour.kernels.matmul(x, packed)
torch.testing.assert_close(y, x @ (weight * mask).T, atol=1e-5, rtol=1e-5)
print(f"multiplied by {twofour.kernels.select(packed, tokens=3).name}")

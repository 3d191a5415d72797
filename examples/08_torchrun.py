"""Several processes: `torchrun --nproc-per-node 2 examples/08_torchrun.py`; FSDP2 and a checkpoint in shards."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import twofour

if "RANK" not in os.environ:  # started without torchrun: start it on two processes of this machine
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    os.execv(sys.executable, [*launcher, __file__])


def network() -> nn.Module:
    """Every process starts with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = twofour.prune(network(), "2:4")  # before or after fully_shard: the masks are the same
fully_shard(model)  # masks are sharded as their weights are: each process holds its part
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = (torch.tensor(part) for part in (load_digits().data / 16, load_digits().target))
for epoch in range(8):
    order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(100):
        mine = batch[rank::world]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine].float()), y[mine]).backward()
        optimizer.step()
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
state = {"model": get_model_state_dict(model), "masks": twofour.masks.state_dict(model)}
checkpoint.save(state, checkpoint_id=folder[0])  # each process writes its shards

other = twofour.prune(network(), "2:4", criterion="random")  # any masks: room for those in the files
fully_shard(other)
stored = {"model": get_model_state_dict(other), "masks": twofour.masks.state_dict(other)}
checkpoint.load(stored, checkpoint_id=folder[0])
set_model_state_dict(other, stored["model"])
twofour.masks.load_state_dict(other, stored["masks"])
assert all(
    torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(other.parameters(), model.parameters(), strict=True)
)
right = (other(x[1400:].float()).argmax(1) == y[1400:]).float().mean().item()
if rank == 0:
    print(f"{world} processes, {len(twofour.masks.of(other))} weights 2:4, {100 * right:.1f} % right")
dist.barrier()  # no process leaves while another still works
dist.destroy_process_group()

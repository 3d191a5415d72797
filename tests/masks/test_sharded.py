"""Two processes over gloo: FSDP2's sharded parameters stay sparse; FSDP1's flat ones are refused."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import twofour
from twofour import masks
from twofour.errors import MaskError

WORLD = 2

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch lacks gloo")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Unflatten(1, (16, 2)), nn.Conv1d(16, 24, 1), nn.Flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters() if parameter.ndim >= 2]  # type: ignore[attr-defined]


def check_fully_shard(prune_first: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = network()
    reference = twofour.prune(network(), "2:4")
    if prune_first:
        twofour.prune(model, "2:4")
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    if not prune_first:
        twofour.prune(model, "2:4")
    keep = [mask.keep for mask in masks.of(model).values()]
    assert [mask.shape for mask in keep] == [(32, 32), (24, 16, 1)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1))
    for weight, mask, plain in zip(weights(model), keep, (reference[0], reference[3]), strict=True):
        assert torch.equal(mask, plain.weight_mask)
        assert (weight[~mask] == 0).all() and (weight[mask] != 0).all()
        torch.testing.assert_close(weight, plain.weight.detach())
    for parameter, mask in zip((model[0].weight, model[3].weight), keep, strict=True):
        for state in ("exp_avg", "exp_avg_sq"):
            assert (optimizer.state[parameter][state].full_tensor()[~mask] == 0).all()
    masks.detach(model)
    derived = [mask.keep for mask in masks.derive(model, "2:4").values()]
    assert all(torch.equal(left, right) for left, right in zip(derived, keep, strict=True))


def check_flat_parameters(use_orig_params: bool, message: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = twofour.prune(network(), "2:4")
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    with pytest.raises(MaskError, match=message):
        train(flat, optimizer)
    masks.detach(model)


def check_replicas() -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), "2:4")
    keep = masks.of(model)["0.weight"].keep.clone()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    train(replica, optimizer)
    assert torch.equal(masks.of(replica)["module.0.weight"].keep, keep)
    assert torch.equal(model[0].weight != 0, keep)
    assert twofour.check(model).ok


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        check_fully_shard(prune_first=True)
        check_fully_shard(prune_first=False)
        check_replicas()
        check_flat_parameters(False, r"can no longer be kept 2:4[\s\S]*flattened \(FSDP1\)")
        check_flat_parameters(True, r"different shapes[\s\S]*FSDP1 shards a weight flat")
    finally:
        dist.destroy_process_group()


def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    spawn(worker, args=(str(tmp_path),), nprocs=WORLD)

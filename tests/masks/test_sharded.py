"""Two processes over gloo: FSDP2's parameters stay sparse under masks sharded alike; FSDP1's flat ones are refused."""

import faulthandler
import os
from datetime import timedelta
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
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Unflatten(1, (16, 2)), nn.Conv1d(16, 27, 1), nn.Flatten())


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
    reference = twofour.prune(network(), "2:4", eligibility="any")
    if prune_first:
        twofour.prune(model, "2:4", eligibility="any")
    for layer in (model[0], model[3], model):
        fully_shard(layer)
    if not prune_first:
        twofour.prune(model, "2:4", eligibility="any")
    check_parts(model)
    keep = [mask.keep.full_tensor() for mask in masks.of(model).values()]
    assert [mask.shape for mask in keep] == [(32, 32), (27, 16, 1)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer)
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1))
    plainly = masks.of(reference).values()
    for weight, mask, plain in zip(weights(model), keep, plainly, strict=True):
        assert torch.equal(mask, plain.keep)
        assert (weight[~mask] == 0).all() and (weight[mask] != 0).all()
        torch.testing.assert_close(weight, plain.module.weight.detach())
    for parameter, mask in zip((model[0].weight, model[3].weight), keep, strict=True):
        for state in ("exp_avg", "exp_avg_sq"):
            assert (optimizer.state[parameter][state].full_tensor()[~mask] == 0).all()
    report = twofour.check(model)  # every process looks at the whole weights, together
    assert report.ok and [finding.outside for finding in report.layers] == [0, 0]
    assert [mask.density for mask in masks.of(model).values()] == [0.5, 0.5]
    check_parts(model)
    masks.detach(model)
    masks.derive(model, "2:4", eligibility="any")
    check_parts(model)
    derived = [mask.keep.full_tensor() for mask in masks.of(model).values()]
    assert all(torch.equal(left, right) for left, right in zip(derived, keep, strict=True))


def check_parts(model: nn.Module) -> None:
    """Each mask is a DTensor with its weight's placements, and this process holds its rows and nothing else."""
    from torch.distributed.tensor import DTensor

    found = masks.of(model)
    assert list(found) == ["0.weight", "3.weight"]
    for mask in found.values():
        weight, keep = getattr(mask.module, mask.attribute), mask.keep
        assert type(keep) is DTensor and type(weight.data) is DTensor
        assert (keep.placements, keep.device_mesh) == (weight.placements, weight.device_mesh)
        mine = keep.to_local()
        assert mine.shape == weight.to_local().shape and mine.shape[0] < weight.shape[0]
        assert mine.dtype == torch.bool and mine.untyped_storage().nbytes() == mine.numel()
        assert not weight.to_local()[~mine].any()


def check_checkpoint(folder: str) -> None:
    """Shards are written and read by torch.distributed.checkpoint; other masks give way to the stored ones."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = twofour.prune(network(), "2:4", eligibility="any")
    fully_shard(model)
    saved = masks.state_dict(model)
    assert all(type(entry["bits"]) is DTensor and entry["bits"].dtype == torch.uint8 for entry in saved.values())
    assert saved["0.weight"]["bits"].shape == (32, 4) and saved["0.weight"]["bits"].to_local().shape == (16, 4)
    checkpoint.save({"model": get_model_state_dict(model), "masks": saved}, checkpoint_id=f"{folder}/shards")
    other = network()
    with torch.no_grad():
        other[0].weight.neg_().add_(0.1)
    twofour.prune(other, "2:4", criterion="random", eligibility="any")
    fully_shard(other)
    assert not torch.equal(*(masks.of(each)["0.weight"].keep.full_tensor() for each in (model, other)))
    stored = {"model": get_model_state_dict(other), "masks": masks.state_dict(other)}
    checkpoint.load(stored, checkpoint_id=f"{folder}/shards")
    set_model_state_dict(other, stored["model"])
    masks.load_state_dict(other, stored["masks"])
    check_parts(other)
    for name, mask in masks.of(model).items():
        assert torch.equal(mask.keep.full_tensor(), masks.of(other)[name].keep.full_tensor())
        assert torch.equal(getattr(mask.module, mask.attribute).full_tensor(), other.get_parameter(name).full_tensor())
    # One process without shards reads the same files: rows of bits are the same.
    plain = twofour.prune(network(), "2:4", criterion="random", eligibility="any")
    rows = {"masks": masks.state_dict(plain)}
    checkpoint.load(rows, checkpoint_id=f"{folder}/shards")
    masks.load_state_dict(plain, rows["masks"])
    assert all(torch.equal(mask.keep, masks.of(model)[n].keep.full_tensor()) for n, mask in masks.of(plain).items())


def check_columns() -> None:
    """A weight sharded along its reduction axis has its mask sharded there; its bits are rows again."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = twofour.prune(network(), "2:4", eligibility="any")
    keep = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None)
    found = masks.of(model)
    assert found["0.weight"].keep.placements == (Shard(1),) and found["0.weight"].keep.to_local().shape == (32, 16)
    saved = masks.state_dict(model)
    assert saved["0.weight"]["bits"].placements == (Shard(0),)
    masks.detach(model)
    masks.load_state_dict(model, saved)
    assert all(torch.equal(mask.keep.full_tensor(), keep[name]) for name, mask in masks.of(model).items())
    assert masks.of(model)["0.weight"].keep.placements == (Shard(1),)


def check_flat_parameters(use_orig_params: bool, message: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = twofour.prune(network(), "2:4")
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    other = twofour.prune(network(), "2:4")
    for _ in range(2):
        with pytest.raises(MaskError, match=message):
            train(flat, optimizer)
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert twofour.check(other).ok
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
    faulthandler.dump_traceback_later(240, exit=True)  # a process that hangs says where, before the test's own limit
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    try:
        check_fully_shard(prune_first=True)
        check_fully_shard(prune_first=False)
        check_checkpoint(folder)
        check_columns()
        check_replicas()
        check_flat_parameters(False, r"can no longer be kept 2:4[\s\S]*flattened \(FSDP1\)")
        check_flat_parameters(True, r"different shapes[\s\S]*FSDP1 shards a weight flat")
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    spawn(worker, args=(str(tmp_path),), nprocs=WORLD)

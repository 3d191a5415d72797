"""Models in several files: each a twofour file by itself, an index that others read, no half-written folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.export.small import Net, masked, quick
from twofour import masks
from twofour.checkpoints import INDEX, WEIGHTS
from twofour.errors import FormatError
from twofour.export import read, shards


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_saved_in_parts_comes_back(tmp_path: Path, compiled: bool) -> None:
    model, x = masked(), torch.randn(3, 16, 4, 4)
    twofour.save(quick(model) if compiled else model, tmp_path / "hub", max_shard_bytes=30_000)
    index = json.loads((tmp_path / "hub" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert (
        files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)] and len(files) > 1
    )
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for part in (read(tmp_path / "hub" / file) for file in files) for tensor in everything(part)
    )
    with torch.device("meta"):
        empty = Net()
    for source in (tmp_path / "hub", tmp_path / "hub" / INDEX):
        fast = twofour.load(source, empty, tokens=(2,))
        torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    if compiled:
        return  # a layer that runs dense here is stored plainly
    back = twofour.load(tmp_path / "hub", Net(), masked=True)
    assert masks.of(back).keys() == masks.of(model).keys() and torch.equal(back.fc.weight, model.fc.weight)


def everything(contents: twofour.export.Contents) -> list[torch.Tensor]:
    packed = [part for weight in contents.packed.values() for part in (weight.values, weight.indices)]
    return [*contents.plain.values(), *packed]


@pytest.mark.parametrize("most", [1, 5_000, 40_000, 10**9])
def test_no_file_is_larger_than_asked_but_for_single_tensors(tmp_path: Path, most: int) -> None:
    twofour.save(masked(), tmp_path / "hub", max_shard_bytes=most)
    if most == 10**9:
        assert names(tmp_path / "hub") == [WEIGHTS], "what fits into one file needs no index"
        return
    for file in (tmp_path / "hub").glob("*.safetensors"):
        part = read(file)
        size = sum(tensor.nbytes for tensor in everything(part))
        assert size <= most or len(part.plain) + len(part.packed) == 1


def test_plain_parts_are_those_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96, n_positions=32)
    torch.manual_seed(0)
    model = twofour.prune(transformers.GPT2LMHeadModel(config).eval(), "2:4")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    twofour.save(model, tmp_path / "ours", packed=False, max_shard_bytes=60_000)
    config.save_pretrained(tmp_path / "ours")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    fast = twofour.load(tmp_path / "theirs", transformers.GPT2LMHeadModel(config), tokens=(9,))
    torch.testing.assert_close(fast(ids).logits, model(ids).logits.detach(), atol=1e-4, rtol=1e-4)


def test_a_tied_weight_whose_names_would_lie_in_two_files(tmp_path: Path) -> None:
    model = nn.Module()
    model.a, model.m, model.z = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    model.z.weight = model.a.weight
    model.forward = lambda x: model.z(model.m(model.a(x)))
    twofour.prune(model, "2:4")
    twofour.save(model, tmp_path / "hub", max_shard_bytes=1)
    with torch.device("meta"):
        empty = nn.Module()
        empty.a, empty.m, empty.z = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        empty.z.weight = empty.a.weight
    back = twofour.load(tmp_path / "hub", empty, masked=True)
    assert back.z.weight is back.a.weight and torch.equal(back.a.weight, model.a.weight)


def test_a_second_save_replaces_the_first_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    twofour.save(masked(0), folder, max_shard_bytes=30_000)
    (folder / "config.json").write_text("{}")
    twofour.save(masked(1), folder, max_shard_bytes=20_000)
    assert all(name.startswith("model.1-") for name in names(folder) if name.endswith(".safetensors")) or len(
        {name for name in names(folder) if name.startswith("model-")}
    ) == len(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(1).fc.weight)
    twofour.save(masked(2), folder)
    assert names(folder) == ["config.json", WEIGHTS]
    assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(2).fc.weight)
    twofour.save(masked(3), folder, max_shard_bytes=30_000)
    assert WEIGHTS not in names(folder) and "config.json" in names(folder)
    assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(3).fc.weight)


@pytest.mark.parametrize("most", [None, 30_000])
def test_an_index_that_names_the_whole_file_does_not_cost_the_new_model(tmp_path: Path, most: int | None) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"fc.weight": WEIGHTS}}))
    twofour.save(masked(0), tmp_path / WEIGHTS)
    twofour.save(masked(1), tmp_path, max_shard_bytes=most)
    assert torch.equal(twofour.load(tmp_path, Net(), masked=True).fc.weight, masked(1).fc.weight)


@pytest.mark.parametrize("step", range(3))
def test_a_save_that_fails_on_the_way_leaves_the_old_model(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub"
    twofour.save(masked(0), folder, max_shard_bytes=30_000)
    write, calls = shards.write, []

    def failing(path: Path, contents: twofour.export.Contents) -> None:
        calls.append(path)
        if len(calls) > step:
            raise OSError("the disk is full")
        write(path, contents)

    monkeypatch.setattr(shards, "write", failing)
    with pytest.raises(FormatError, match="the disk is full"):
        twofour.save(masked(1), folder, max_shard_bytes=20_000)
    assert torch.equal(twofour.load(folder, Net(), masked=True).fc.weight, masked(0).fc.weight)


@pytest.mark.parametrize(
    ("path", "most", "said"),
    [
        ("x.safetensors", 5, "several files"),
        ("hub", 0, "impossible"),
        ("hub", "5GB", "impossible"),
        ("hub", True, "imp"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(tmp_path: Path, path: str, most, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        twofour.save(masked(), tmp_path / path, max_shard_bytes=most)
    assert not names(tmp_path)


def test_tied_heads_that_a_checkpoint_leaves_out_are_found(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    twofour.save(nn.ModuleDict({"embed": model.embed}), tmp_path / "m.safetensors")
    back = twofour.load(tmp_path / "m.safetensors", Tied(), tokens=(2,))
    assert torch.equal(back.embed.weight, model.embed.weight)


MEASURED = """
import sys
import torch
import twofour.export
from torch import nn

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
twofour.compile(nn.Sequential(nn.Linear(1024, 1024, bias=False)), tokens=(1,), memory="small")
before = anonymous()
contents = twofour.export.read(sys.argv[1])
held = anonymous() - before
del contents
fast = twofour.load(sys.argv[1], model, memory="small", tokens=(1,))
loaded = anonymous() - before
assert fast(torch.randn(1, 1024)).isfinite().all() and "nm_" in fast.plan.layers[0].dispatch
dense = 16 * 4 * 1024 * 1024
print(held / dense, loaded / dense)
"""


def test_packed_files_are_read_and_dense_weights_not_in_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read the process's memory from")
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))), "2:4")
    twofour.save(model, tmp_path / "hub", max_shard_bytes=10_000_000)
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, tmp_path / "hub"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    held, loaded = map(float, run.stdout.split())
    assert held < 0.6, "the bytes of the files, which are 17/32 of dense"
    assert 0.4 < loaded < 0.7, "2:4 in float32 is 17/32 of dense"

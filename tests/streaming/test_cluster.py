"""Files spread over a local Ray cluster of two workers: the bytes of the single process (`make test-ray`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints.small import shards
from twofour import streaming
from twofour.checkpoints import Checkpoint
from twofour.errors import PatternError, SourceError
from twofour.recipe import Recipe

ray = pytest.importorskip("ray", reason="needs the extra [ray]: make test-ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's own start


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers of one core each, which find twofour where this process does."""
    start = time.monotonic()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    print(f"Ray {ray.__version__} started in {time.monotonic() - start:.1f} s")
    yield
    ray.shutdown()


def source(folder: Path, bad: bool = False) -> Path:
    torch.manual_seed(0)
    files = [{f"{file}.{n}.weight": torch.randn(64, 256).bfloat16() for n in range(3)} for file in "abcdef"]
    if bad:
        files[4]["e.1.weight"][5, 7] = float("nan")
    return shards(folder, *files)


def plan(folder: Path, criterion: str = "magnitude") -> streaming.Plan:
    return streaming.plan_file(Checkpoint.open(folder), Recipe.parse("2:4", criterion=criterion), [("*", 1)])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_two_workers_give_the_bytes_of_one_process(cluster, tmp_path: Path, criterion: str):
    made = plan(source(tmp_path / "in"), criterion)
    spread = streaming.prune(made, tmp_path / "spread", cluster="auto")
    alone = streaming.prune(made, tmp_path / "alone")
    assert spread.layers == alone.layers and len(spread.layers) == 18
    assert content(tmp_path / "spread") == content(tmp_path / "alone")


def test_files_go_to_both_workers(cluster, tmp_path: Path):
    made = plan(source(tmp_path / "in"))
    seen = {pid for pid in ray.get([ray.remote(_pid).remote(tmp_path / str(n)) for n in range(2)])}
    assert len(seen) == 2 and os.getpid() not in seen
    total: list[tuple[int, int]] = []
    streaming.prune(
        made, tmp_path / "out", cluster="auto", progress=lambda done, all_, what: total.append((done, all_))
    )
    assert len(total) == 6


def _pid(mine: Path) -> int:
    """Wait for the other worker, so that two are needed."""
    mine.touch()
    while len(list(mine.parent.glob("[01]"))) < 2:
        time.sleep(0.05)
    return os.getpid()


def test_an_error_of_a_worker_is_that_of_the_process(cluster, tmp_path: Path):
    made = plan(source(tmp_path / "in", bad=True))
    with pytest.raises(PatternError, match=r"`e.1.weight`(.|\n)*\(5, 7\)"):
        streaming.prune(made, tmp_path / "out", cluster="auto")
    assert (tmp_path / "out.journal.json").exists()  # the finished files stay for the next run


def test_a_cluster_that_is_not_there(tmp_path: Path):
    if ray.is_initialized():
        ray.shutdown()
    made = plan(source(tmp_path / "in"))
    with pytest.raises(SourceError, match="does not answer"):
        streaming.prune(made, tmp_path / "out", cluster="127.0.0.1:1")

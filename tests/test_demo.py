"""The demo in a tiny configuration, its data, and what it refuses."""

import gzip
import json
import os
import signal
import struct
import tomllib

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.forked import status_of
from twofour import measure
from twofour.checker import check
from twofour.demo import data as datasets
from twofour.demo import demo
from twofour.demo.folder import RESULTS, run_folder
from twofour.demo.network import VisionTransformer
from twofour.demo.settings import SETTINGS, quick
from twofour.demo.summary import BEST_DENSE, EAGER, OURS, Difference
from twofour.errors import DataError
from twofour.export import load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TWOFOUR_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("runs") / "demo"
    try:
        yield demo(quick=True, out=folder, progress=False)
    finally:
        patch.undo()


def tiny(side: int = 8) -> VisionTransformer:
    s = quick(SETTINGS["digits"])
    return VisionTransformer(side, s.patch, s.width, s.hidden, s.layers, s.heads, 10)


def test_it_measures_four_models_and_three_latencies(run):
    assert set(run.accuracy) == {"dense", "control", "one-shot", "sparse"}
    assert all(0 <= value <= 1 for value in run.accuracy.values())
    assert run.accuracy["sparse"] == run.training.sparse.evaluation
    assert run.training.control is not None and len(run.training.control.history) == 2
    assert run.agreement == 1.0
    for batch, record in run.latency.items():
        assert batch in (1, 4) and set(record.timings) >= {EAGER, BEST_DENSE, OURS}
        best = min(record.median(EAGER), record.median(BEST_DENSE))
        assert record.ratio(OURS) == pytest.approx(best / record.median(OURS))


def test_it_leaves_a_run_folder(run):
    names = {path.name for path in run.folder.iterdir()}
    assert names == set(RESULTS)
    assert tomllib.loads((run.folder / "recipe.toml").read_text())["rule"] == [{"layers": "*", "pattern": "2:4"}]
    assert [record.meta["batch"] for record in measure.load(run.folder / "records.json")] == [1, 4]
    stored = json.loads((run.folder / "summary.json").read_text())
    assert stored["accuracy"]["sparse"] == run.accuracy["sparse"] and stored["bytes"]["packed"] == run.bytes_packed
    page = (run.folder / "report.html").read_text()
    for words in ("Demo on digits", "Loss of training", "layers run sparse", "masks are kept", "too small to judge by"):
        assert words in page
    text = (run.folder / "summary.txt").read_text()
    for word in (
        "F.linear",
        "best dense kernels",
        "one-shot",
        "ours",
        "n = 128",
        "layers run sparse",
        "too small to judge",
    ):
        assert word in text


def test_the_saved_model_is_packed_and_sparse(run):
    # fp32 2:4: half of the values and 2 bits of index each, 0.53125 of the dense bytes, where the weights are wide
    assert run.bytes_packed < 0.75 * run.bytes_dense
    with safe_open(run.folder / "model.safetensors", "pt") as file:
        assert file.metadata()
    model = load(run.folder / "model.safetensors", tiny(), masked=True)
    assert check(model).ok
    assert not model.layers[0].fc1.weight.detach().reshape(-1, 4).ne(0).sum(1).gt(2).any()


def test_a_second_run_never_overwrites_the_first(run):
    before = (run.folder / "summary.txt").read_text()
    with pytest.raises(DataError) as caught:
        demo(quick=True, out=run.folder, progress=False)
    assert "never overwritten" in str(caught.value) and "try     pass another out" in str(caught.value)
    assert (run.folder / "summary.txt").read_text() == before


def test_unknown_data():
    with pytest.raises(DataError, match='"digits" or "fashion-mnist"'):
        demo(data="cats")


def test_the_paired_error_counts_disagreements_only():
    sparse, control = [True] * 90 + [False] * 10, [True] * 88 + [False] * 6 + [True] * 6
    both = Difference.of(sparse, control)
    b, c, n = 2, 6, 100
    values = np.array([int(s) - int(c) for s, c in zip(sparse, control, strict=True)])
    assert both.value == pytest.approx(values.mean()) == pytest.approx((b - c) / n)
    assert both.error == pytest.approx(values.std() / n**0.5)


def test_patches_are_squares_of_the_image():
    model = tiny()
    seen = []
    model.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    image = torch.arange(64.0).view(1, 8, 8)
    assert model(image).shape == (1, 10)
    assert seen[0].shape == (1, 16, 4)
    assert seen[0][0, 5].tolist() == [18.0, 19.0, 26.0, 27.0]  # second row of patches, second of it


def test_digits_are_split_without_overlap():
    one, other = (datasets.load("digits", train=1257, test=540, seed=seed) for seed in (0, 1))
    assert one.train.shape == (1257, 8, 8) and one.test.shape == (540, 8, 8) and one.classes == 10
    assert abs(float(one.train.mean())) < 1e-5 and float(one.train.std()) == pytest.approx(1, abs=1e-5)
    rows = {tuple(row) for row in one.train.flatten(1).tolist()}
    assert not any(tuple(row) in rows for row in one.test.flatten(1).tolist())
    assert not torch.equal(one.test_labels, other.test_labels)


def test_fashion_mnist_from_the_data_folder(data_dir, monkeypatch):
    if not (data_dir / "fashion-mnist").is_dir():
        pytest.skip(f"no fashion-mnist in {data_dir}")
    monkeypatch.setenv("TWOFOUR_DATA", str(data_dir))
    images = datasets.load("fashion-mnist", train=1000, test=500)
    assert images.train.shape == (1000, 28, 28) and images.test_labels.shape == (500,)
    assert images.classes == 10 and images.train_labels.bincount().min() > 50


def test_a_missing_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOFOUR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="set TWOFOUR_DATA"):
        datasets.load("fashion-mnist", train=10, test=10)
    (tmp_path / "nowhere" / "fashion-mnist").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be read as an IDX file"):
        datasets.load("fashion-mnist", train=10, test=10)


def idx(shape: tuple[int, ...], content: bytes, kind: int = 8) -> bytes:
    return bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + content


def test_idx_round_trip(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx((2, 3), bytes(range(6)))))
    assert datasets.read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00",
        idx((2, 3), bytes(5)),
        idx((2, 3), bytes(7)),
        idx((2, 3), bytes(24), kind=13),
        idx((0,), b""),
        idx((1 << 31, 1 << 31), bytes(9)),
        idx((2, 3, 1, 1), bytes(6)),
        idx((2, 3), b"")[:9],
        b"\x01" + idx((2, 3), bytes(6))[1:],
    ],
)
def test_malformed_idx(tmp_path, content):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="cannot be read as an IDX file"):
        datasets.read_idx(path)


def test_idx_that_is_not_gzip_or_is_cut(tmp_path):
    path = tmp_path / "a.gz"
    for content in (b"hello", gzip.compress(idx((40, 40), bytes(1600)))[:-9]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as an IDX file"):
            datasets.read_idx(path)


def asked(seed: int = 0) -> dict:
    return {"data": "digits", "seed": seed, "quick": True}


def killed_in(folder, seed: int = 0) -> None:
    """Leave what a demo leaves that is killed after its first file."""

    def begun() -> None:
        with run_folder(folder, asked(seed)):
            (folder / "records.json").write_text("[]")
            os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(begun) == -signal.SIGKILL


def test_a_run_that_was_killed_starts_again_in_its_folder(tmp_path):
    killed_in(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    with run_folder(tmp_path, asked()) as folder:
        assert folder == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"records.json", "thesis.txt"}
    with pytest.raises(DataError, match="never overwritten"), run_folder(tmp_path, asked()):
        pass


def test_another_run_does_not_start_in_the_folder_of_a_killed_one(tmp_path):
    killed_in(tmp_path, seed=1)
    with pytest.raises(DataError, match="holds another run of the demo") as caught, run_folder(tmp_path, asked()):
        pass
    assert '"seed": 1' in str(caught.value) and "give the command that was stopped" in str(caught.value)
    (tmp_path / "unfinished.json").write_text("{")
    with pytest.raises(DataError, match="holds another run"), run_folder(tmp_path, asked(1)):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path):
    def second() -> int:
        with pytest.raises(DataError, match="another process is writing"), run_folder(tmp_path / "run", asked()):
            pass
        return 7

    with run_folder(tmp_path / "run", asked()):
        assert status_of(second) == 7


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"), run_folder(tmp_path / "file" / "run", asked()):
        pass

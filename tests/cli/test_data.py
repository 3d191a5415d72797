"""twofour prune --data and --permute: every kind of data, the same result as in Python, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import twofour
from tests.cli.small import ZOO, refused
from twofour.cli import data
from twofour.cli import source as sources

MORE = """

def inputs():
    torch.manual_seed(1)
    return [torch.randn(8, 64) for _ in range(4)]

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x, y):
        return self.out(self.left(x) + self.right(y))

two = Two
"""


@pytest.fixture
def zoo(run, tmp_path: Path):
    (tmp_path / "zoo_cli.py").write_text(ZOO + MORE)
    return run


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random BERT with a tokenizer of eight words."""
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra [text]")
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=16, max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d", "e", "f"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return folder


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.cat([torch.randn(8, 64) for _ in range(4)])


def write(path: str) -> None:
    x = inputs()
    match Path(path).suffix:
        case ".safetensors":
            save_file({"input": x}, path)
        case ".npy":
            np.save(path, x.double().numpy())
        case ".npz":
            np.savez(path, x.double().numpy())


@pytest.mark.parametrize("data", ["zoo_cli:inputs", "x.safetensors", "x.npy", "x.npz"])
def test_every_kind_of_data_gives_what_python_gives(zoo, data: str):
    write(data)
    result = zoo("prune", "zoo_cli:small", "--out", "out", "--criterion", "sparsegpt", "--data", data)
    assert result.exit_code == 0, result.output
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))
    twofour.prune(model, "2:4", criterion="sparsegpt", data=list(inputs().split(8)))
    written = load_file("out/model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


def test_without_a_criterion_data_bring_the_best_and_what_is_left_out_is_said(zoo) -> None:
    np.savez("many.npz", x=np.random.default_rng(0).standard_normal((1044, 64), dtype=np.float32))
    result = zoo("prune", "zoo_cli:small", "--out", "best", "--data", "many.npz")
    assert result.exit_code == 0, result.output
    assert "criterion: admm, calibrated on 1024 samples" in result.stdout
    assert (
        "1024 samples spread over the data; not used: 4 samples of batch " in result.stdout
        and "no data" not in result.stdout
    )
    assert 'criterion = "admm"' in Path("best/recipe.toml").read_text()
    assert "reconstructed: answers to " in result.stdout
    report = json.loads(Path("best/report.json").read_text())["reconstruction"]
    assert report["kept"] is (report["after"] < report["before"]) and report["samples"] > 0
    plain = zoo("prune", "zoo_cli:small", "--out", "plain")
    assert plain.exit_code == 0 and 'no data: pruned by "magnitude"; with --data' in plain.stdout
    assert 'criterion = "magnitude"' in Path("plain/recipe.toml").read_text()


def test_several_arrays_are_arguments_by_name(zoo):
    np.savez("xy.npz", x=inputs().numpy(), y=inputs().flip(0).numpy())
    result = zoo("prune", "zoo_cli:two", "--out", "out", "--criterion", "wanda", "--data", "xy.npz")
    assert result.exit_code == 0 and "3 of 3 promised weights kept" in result.stdout, result.output
    np.savez("xz.npz", x=inputs().numpy(), z=inputs().numpy())
    words = ("prune", "zoo_cli:two", "--out", "no", "--criterion", "wanda", "--data")
    refused(zoo(*words, "xz.npz"), "DataError", "unexpected keyword argument 'z'")
    np.savez("odd.npz", x=inputs().numpy(), y=inputs()[:5].numpy())
    refused(zoo(*words, "odd.npz"), "the same number of samples", "x (32, 64), y (5, 64)", "arguments of forward")


@pytest.mark.parametrize(
    "options, rebuilt",
    [
        (("--no-reconstruct",), False),
        (("--criterion", "wanda"), False),
        (("--criterion", "wanda", "--reconstruct"), True),
        (("--skip", "0"), True),
    ],
)
def test_reconstruction_is_what_python_does(zoo, options: tuple[str, ...], rebuilt: bool) -> None:
    write("x.npz")
    result = zoo("prune", "zoo_cli:small", "--out", "out", "--data", "x.npz", *options)
    assert result.exit_code == 0, result.output
    assert ("reconstructed: " in result.stdout) is rebuilt
    assert ("reconstruction" in json.loads(Path("out/report.json").read_text())) is rebuilt
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 10))
    named = {"criterion": "wanda"} if "wanda" in options else {}
    asked = True if "--reconstruct" in options else False if "--no-reconstruct" in options else None
    skip = ["0"] if "--skip" in options else []
    twofour.prune(model, "2:4", data=list(inputs().split(8)), reconstruct=asked, skip=skip, **named)
    written = load_file("out/model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())


def test_reconstruction_needs_data(zoo) -> None:
    refused(zoo("prune", "zoo_cli:small", "--out", "no", "--reconstruct"), "--reconstruct needs inputs", "--data FILE")


def test_permute(zoo):
    write("x.npz")
    criterion = ("--criterion", "magnitude")  # with data the default is another one, whose values are others
    plain = zoo("prune", "zoo_cli:small", "--out", "plain", *criterion)
    better = zoo("prune", "zoo_cli:small", "--out", "out", "--permute", "--data", "x.npz", *criterion)
    assert plain.exit_code == better.exit_code == 0, better.output
    assert "permuted: magnitude kept " in better.stdout
    found = json.loads(Path("out/report.json").read_text())["permutation"]
    assert found["magnitude_after"] > found["magnitude_before"] and found["error"] < 1e-5 and found["groups"]
    kept = [sum(v.abs().sum() for v in load_file(f"{name}/model.safetensors").values()) for name in ("plain", "out")]
    assert kept[1] > kept[0]
    assert "permutation" not in json.loads(Path("plain/report.json").read_text())
    refused(zoo("prune", "zoo_cli:small", "--out", "no", "--permute"), "--permute needs inputs", "--data FILE")


def test_texts_go_through_the_folders_tokenizer(run, bert: Path):
    Path("texts.txt").write_text("a b c d\n\ne f\n" * 6)
    Path("texts.jsonl").write_text('"a b c d"\n{"text": "e f"}\n' * 6)
    for name in ("texts.txt", "texts.jsonl"):
        options = ("--criterion", "wanda", "--permute", "--data", name, "--length", "3")
        result = run("prune", str(bert), "--out", name[-3:], *options)
        assert result.exit_code == 0, result.output
        assert "promised weights kept" in result.stdout and "permuted: " in result.stdout
    note = json.loads(Path("txt/config.json").read_text())["twofour"]
    assert note["criterion"] == "wanda" and note["patterns"].keys() == {"2:4"}
    first, second = (load_file(f"{name}/model.safetensors") for name in ("txt", "onl"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_refusals(run, bert: Path):
    words = ("prune", "zoo_cli:small", "--out", "no", "--criterion", "wanda", "--data")
    Path("t.txt").write_text("a\n")
    refused(run(*words, "t.txt"), "SourceError", "need a tokenizer", "zoo_cli:small", "a Hugging Face folder as SOURCE")
    refused(run(*words, "none.npz"), "--data none.npz cannot be used", "no such file", ".npz", "numpy.savez")
    Path("t.csv").write_text("1,2\n")
    refused(run(*words, "t.csv"), "a .csv file")
    np.savez("objects.npz", x=np.array([{}], dtype=object))
    refused(run(*words, "objects.npz"), "--data objects.npz cannot be read", "arrays of numbers")
    Path("bad.safetensors").write_bytes(b"nothing")
    refused(run(*words, "bad.safetensors"), "--data bad.safetensors cannot be read")
    refused(run(*words, "zoo_cli:missing"), "has no function `missing`", "returns calibration data, or a file")
    hub = ("prune", str(bert), "--out", "no", "--criterion", "wanda", "--data")
    Path("e.txt").write_text("\n")
    refused(run(*hub, "e.txt"), "holds no text", "one text a line")
    Path("e.jsonl").write_text('{"text": "a"}\n{"words": 1}\n')
    refused(run(*hub, "e.jsonl"), "line 2 of --data e.jsonl is no text", 'under "text"')
    Path("u.txt").write_text("x y z\n" * 9)
    refused(run(*hub, "u.txt"), "does not know the words of u.txt", "[UNK] for 100% of the tokens")
    Path("bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (Path("bare") / name).write_bytes((bert / name).read_bytes())
    bare = ("prune", "bare", *hub[2:])
    refused(run(*bare, "t.txt"), "bare has no tokenizer that can be loaded")
    save_file({"fc.weight": torch.randn(16, 32)}, "w.safetensors")
    weights = ("prune", "w.safetensors", "--out", "no", "--include", "fc", "--axis", "1", "--permute")
    refused(run(*weights), "need a model to run", "no --data, --permute or --reconstruct")
    refused(run("prune", "zoo_cli:small", "--out", "no", "--criterion", "learned"), "follows a loss", "loss=...")
    assert not Path("no").exists()


def test_labelled_pairs_judge_an_embedder(run, bert: Path):
    Path("pairs.tsv").write_text("a b\tc d\t0.5\n\na b\ta b\t5\ne f\td\t1\n")
    rows = [("a b", "c d", 0.5), ("a b", "a b", 5), ("e f", "d", 1)]
    Path("pairs.jsonl").write_text("".join(json.dumps({"text": a, "other": b, "score": c}) + "\n" for a, b, c in rows))
    source = sources.resolve(str(bert))
    tabs, lines = (data.pairs(name, source, 8, "mean") for name in ("pairs.tsv", "pairs.jsonl"))
    assert tabs.scores.tolist() == lines.scores.tolist() == [0.5, 5.0, 1.0]
    assert all(torch.equal(tabs.second[0][name], lines.second[0][name]) for name in ("input_ids", "attention_mask"))
    Path("many.tsv").write_text("".join(f"a b\tc d\t{index}\n" for index in range(600)))
    drawn = data.pairs("many.tsv", source, 8, "mean").scores.tolist()
    assert drawn == sorted({*drawn}) and len(drawn) == data.MOST_PAIRS and drawn[-1] > data.MOST_PAIRS
    words = ("optimize", str(bert), "--data", "pairs.tsv", "--out", "no", "--pairs")
    bad = [("a\tb\n", "line 1 of --pairs bad.tsv is no"), ("a\tb\tnan\n", "no labelled pair"), ("a\tb\t1\n", "too few")]
    for content, text in bad:
        Path("bad.tsv").write_text(content)
        refused(run(*words, "bad.tsv"), text)
    refused(run(*words, "none.tsv"), "--pairs none.tsv cannot be read")
    refused(run(*words, "pairs.tsv", "--evaluate", "zoo_cli:small"), "judged in one way")


def test_a_folder_is_called_one(zoo):
    Path("folder").mkdir()
    Path("noted").write_text("a")
    words = ("prune", "zoo_cli:small", "--out", "no", "--criterion", "wanda", "--data")
    refused(zoo(*words, "folder"), "SourceError", "got     a folder\n")
    refused(zoo(*words, "noted"), "SourceError", "got     a file without an ending\n")

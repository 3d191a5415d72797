"""experiments/perplexity.py: the published protocol, and the whole path on a published Llama of 231k parameters."""

import gzip
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import threads
from twofour.errors import DataError, SourceError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(EXPERIMENTS))
    with threads(1):  # products of 64 columns: a second thread only waits
        yield
    sys.path.remove(str(EXPERIMENTS))


def letters(text: str, return_tensors: str = "pt") -> Any:
    """A tokenizer: one token per character."""
    return SimpleNamespace(input_ids=torch.tensor([[ord(letter) for letter in text]]))


def published_windows(texts: list[str], samples: int, length: int, seed: int) -> list[Tensor]:
    """The loop of get_c4 in the published code (Wanda, lib/data.py), with our tokenizer."""
    random.seed(seed)
    windows = []
    for _ in range(samples):
        while True:
            i = random.randint(0, len(texts) - 1)
            tokens = letters(texts[i]).input_ids
            if tokens.shape[1] > length:
                break
        i = random.randint(0, tokens.shape[1] - length - 1)
        windows.append(tokens[:, i : i + length])
    return windows


def test_calibration_windows_are_those_of_the_published_code():
    from perplexity import drawn

    texts = [chr(97 + n) * n + "the end" for n in range(26)]
    ours, theirs = drawn(texts, letters, 9, 16, 3), published_windows(texts, 9, 16, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_texts_that_are_too_short_are_refused():
    from perplexity import cut, drawn

    with pytest.raises(DataError, match="2 texts, 5 tokens at most"):
        drawn(["short", "text"], letters, 4, 5, 0)
    with pytest.raises(DataError, match="5 tokens"):
        cut(letters("short").input_ids, 8)
    assert [window.shape for window in cut(letters("a longer text").input_ids, 4)] == [(1, 4)] * 3


def test_perplexity_is_the_mean_of_windows_in_float64():
    from perplexity import perplexity

    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 8).requires_grad_(False), nn.Linear(8, 11).requires_grad_(False)
    model = nn.Module()
    model.parts = nn.ModuleList([embedding, head])
    model.forward = lambda input_ids, use_cache: SimpleNamespace(logits=head(embedding(input_ids)))
    windows = list(torch.randint(11, (3, 1, 7)).unbind())
    chances = head.double()(embedding.double().weight).softmax(-1)
    logs = [-sum(math.log(chances[a, b]) for a, b in zip(w[0, :-1], w[0, 1:], strict=True)) / 6 for w in windows]
    want = math.exp(sum(logs) / 3)
    model.float()
    assert perplexity(model, windows) == pytest.approx(want, rel=1e-6)


def test_documents_of_every_kind(tmp_path: Path):
    from perplexity import documents

    (tmp_path / "a.txt").write_text(" = Title = \n \n words\n")
    assert documents(str(tmp_path / "a.txt")) == [" = Title = \n" + "\n\n" + "\n\n" + " words\n"]
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    assert documents(str(tmp_path / "b.json.gz")) == ["one", "two"]
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n["two"]\n')
    with pytest.raises(SourceError, match=r"line 2 of .*c\.jsonl"):
        documents(str(tmp_path / "c.jsonl"))
    with pytest.raises(SourceError, match="a file, or wikitext2 or c4"):
        documents(str(tmp_path / "none.txt"))


def test_a_data_set_without_the_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    from perplexity import documents

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"pip install datasets[\s\S]*--calibration c4-train"):
        documents("c4")


def test_the_whole_path_on_a_small_llama(tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]):
    """As a user runs it on Llama-2-7B: a Hugging Face folder, two texts, criteria with and without data."""
    import perplexity
    from tasks.stories import Stories, save, tokenizer

    save(tmp_path / "llama")
    assert perplexity.context(tmp_path / "llama") == 128
    generator = torch.Generator().manual_seed(0)
    causal, cache, tokens = Stories().network(0).causal, None, torch.full((24, 1), 1)
    with torch.inference_mode():
        for _ in range(70):
            answer = causal(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            tokens = torch.cat([tokens, torch.multinomial(answer.logits[:, -1].softmax(-1), 1, generator=generator)], 1)
    texts = tokenizer().batch_decode(tokens, skip_special_tokens=True)
    (tmp_path / "test.txt").write_text("\n".join(texts[:8]))
    (tmp_path / "c4.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[8:]))
    options: dict[str, Any] = {"text": str(tmp_path / "test.txt"), "calibration": str(tmp_path / "c4.jsonl")}
    options |= {"samples": 24, "length": 48, "eligibility": "any", "json": tmp_path / "rows.json"}
    perplexity.main(str(tmp_path / "llama"), criterion=["random", "wanda", "sparsegpt"], **options)
    found = {row["criterion"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert [row["pruned"] for row in found.values()] == [0, 28, 28, 28]  # 7 weights of 4 layers; the tied head is dense
    value = {name: row["perplexity"] for name, row in found.items()}
    assert value["dense"] < value["sparsegpt"] < value["random"] and value["dense"] < value["wanda"] < value["random"]
    assert f"| sparsegpt | {value['sparsegpt']:.2f} | 28 |" in capsys.readouterr().out

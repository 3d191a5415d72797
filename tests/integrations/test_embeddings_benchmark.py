"""The benchmark of embeddings on a tiny model: every engine answers, and what cannot is named."""

import importlib

import pytest
from rich.console import Console

import twofour
from tests.integrations.folders import SENTENCES, folder_of, model_of


@pytest.mark.long
def test_engines_are_timed_and_correlated(benchmarks, tmp_path, times_cache, monkeypatch, capsys):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    folder = folder_of(model_of("BertModel"), tmp_path / "plain")
    sentence_transformers.SentenceTransformer(str(folder), device="cpu").save_pretrained(str(tmp_path / "st"))
    case = importlib.import_module("cases.embeddings")
    monkeypatch.setattr(case, "_weights", lambda: tmp_path / "st")
    monkeypatch.setattr(case, "pairs", lambda part: (SENTENCES, SENTENCES[::-1], [0.1 * n for n in range(6)]))
    monkeypatch.setattr(case, "sentences", lambda name: SENTENCES)
    monkeypatch.setattr(case, "OURS", {"twofour 2:4 float32": ("2:4", "float32")})
    monkeypatch.setattr(
        case, "PEERS", {name: case.PEERS[name] for name in ("torch", "ONNX Runtime", "ONNX Runtime int8")}
    )
    (cell,) = case.cells(["stsb"], [1], 4)
    record = case.Bench(0.01, without=["ONNX Runtime int8"])(cell)
    found = record.meta["spearman"]
    assert {"torch", "ONNX Runtime", "twofour 2:4 float32"} <= record.timings.keys()
    assert found["torch"] == pytest.approx(found["ONNX Runtime"], abs=0.1)
    assert record.meta["missing"] == {"ONNX Runtime int8": "left out by --without"}
    case.show([record], Console(width=200))
    assert "sentences a second" in capsys.readouterr().out
    with pytest.raises(twofour.errors.DataError, match="books"):
        case.cells(["books"], [1], 4)

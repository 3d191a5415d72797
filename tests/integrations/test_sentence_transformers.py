"""The six lines: SentenceTransformer and CrossEncoder with our config, without a patch of either."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twofour
from tests.integrations.folders import SENTENCES, folder_of, model_of
from twofour.integrations import TwoFourConfig

OURS = {"model_kwargs": {"quantization_config": TwoFourConfig()}}


@pytest.fixture(scope="module")
def sentences() -> Any:
    """sentence_transformers: a second to import, which those that run no test of this file are spared."""
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(autouse=True)
def _cached(times_cache, monkeypatch):
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(sentences, tmp_path):
    where = folder_of(twofour.prune(model_of("BertModel"), "2:4"), tmp_path / "plain")
    made = sentences.SentenceTransformer(str(where), device="cpu")  # mean pooling over plain weights
    made.save_pretrained(str(tmp_path / "st"))
    return str(tmp_path / "st")


def test_encode_at_mixed_lengths_and_batches(sentences, folder, tmp_path, caplog):
    plain = sentences.SentenceTransformer(folder, device="cpu")
    fast = sentences.SentenceTransformer(folder, device="cpu", **copy.deepcopy(OURS))
    caplog.clear()
    for size in (1, 4, 32):
        found, wanted = (model.encode(SENTENCES * 3, batch_size=size) for model in (fast, plain))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert "layer by layer" not in caplog.text
    fast.save_pretrained(str(tmp_path / "again"))
    again = sentences.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(again.encode(SENTENCES), plain.encode(SENTENCES), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_packed_out_and_in(sentences, folder, tmp_path):
    config = TwoFourConfig("int8", packed=True)
    fast = sentences.SentenceTransformer(folder, device="cpu", model_kwargs={"quantization_config": config})
    fast.save_pretrained(str(tmp_path / "packed"))
    again = sentences.SentenceTransformer(str(tmp_path / "packed"), device="cpu")
    np.testing.assert_allclose(again.encode(SENTENCES), fast.encode(SENTENCES), atol=0.05)


@pytest.mark.long
def test_cross_encoder(sentences, tmp_path, caplog):
    folder = folder_of(twofour.prune(model_of("BertForSequenceClassification"), "2:4"), tmp_path / "cross")
    plain = sentences.CrossEncoder(str(folder), device="cpu")
    fast = sentences.CrossEncoder(str(folder), device="cpu", **copy.deepcopy(OURS))
    pairs = [[one, other] for one in SENTENCES for other in SENTENCES[:3]]
    caplog.clear()
    np.testing.assert_allclose(fast.predict(pairs), plain.predict(pairs), rtol=1e-4, atol=1e-5)
    assert "layer by layer" not in caplog.text


@pytest.mark.long
def test_the_page_runs(sentences, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dense = folder_of(model_of("BertModel"), tmp_path / "dense")
    sentences.SentenceTransformer(str(dense), device="cpu").save_pretrained("minilm")
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    page = page.replace("sentence-transformers/all-MiniLM-L6-v2", "minilm")  # no network here
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})
    assert "int8" in capsys.readouterr().out

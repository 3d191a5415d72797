"""How far is twofour.hardware from published GEMM times? Fits its constants, leaves families and GPUs out.

git clone https://github.com/bcacdwk/vllmbench    # Apache-2.0; read at 92a8ca49
python experiments/hardware.py vllmbench [record, experiments/records/hardware/gemm.json]

Fits: all rows (the constants of the package), each model family left out, each GPU left out; the last two are judged on
what they have not seen. A GPU that was left out has none of the constants that each GPU has for itself: it is priced as
the package prices any machine that it has no constants for. The margin, too, is that of the rows that a fit sees.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twofour import measure
from twofour.hardware import MACHINES, Fitted, cut, price
from twofour.hardware.fitted import GPU

NAMES = {"A100": "a100-pcie", "H100": "h100-pcie", "B200": "b200", "RTX4090": "rtx-4090"}
NAMES |= {"RTX5080": "rtx-5080", "GB10": "gb10"}
DTYPES = {"BF16": "bfloat16", "FP16": "float16", "FP8": "float8", "INT8": "int8"}
SIDES = {"cuBLASLt": "", "cuSPARSELt": "_2_4"}
"""The two libraries, and what ends a file's name: of cuSPARSELt's other patterns nothing is read."""

TIE, EVERY, STEPS = 0.03, 3, 20
SMALL, SPREAD, WINNER, BEYOND = 0.1, 0.5, 0.5, 0.05
"""Of the loss: where errors grow slower than their square; weights of the speed-up and of the winner; how far beyond 1
a speed-up has to be told."""
FEW = 256
"""Tokens up to which a product counts as one of few."""
MOST = {"cache": 1, "memory": 1, "quantized": 1, "int8_issue": 1, "sparse_sustained": 1, "sustained": 1.1, "boost": 1.1}
"""Constants that cannot be more: shares of a whole; clocks may stand a tenth above the published peak's."""
START = Fitted(
    launch=dict.fromkeys(NAMES.values(), 5e-6),
    sustained=dict.fromkeys(("a100-pcie", "h100-pcie", "b200", "gb10"), 0.8),
    **{"sparse_sustained": 0.8, "int8_issue": 0.9, "boost": 1.0, "sparse_tile": 1e-6, "split": 5e-6, "port": 40.0},
    **{"load_shared": 20.0, "load_async": 100.0, "step": 3e-9, "sparse_step": 3e-9},
    **{"memory": 0.8, "cache": 0.7, "quantized": 0.7, "sparse_issue": 0.7, "margin": 1.0},
)
"""Where every fit starts: round guesses."""


@dataclasses.dataclass
class Block:
    """The rows of one GPU and type: seconds measured, dense and 2:4, and the work of both."""

    gpu: str
    dtype: str
    family: np.ndarray
    shape: np.ndarray
    seconds: np.ndarray
    work: Any = None

    def predict(self, fitted: Fitted) -> np.ndarray:
        """Seconds of each row, dense and 2:4."""
        machine = MACHINES[self.gpu]
        sides = [
            price(work, machine, self.dtype, bool(side), cold=False, fitted=fitted).seconds
            for side, work in enumerate(self.work)
        ]
        return np.stack(sides)

    def only(self, keep: np.ndarray) -> Block:
        """Some of the rows."""
        return block(self.gpu, self.dtype, self.family[keep], self.shape[keep], self.seconds[:, keep])


def block(gpu: str, dtype: str, family: np.ndarray, shape: np.ndarray, seconds: np.ndarray) -> Block:
    """Cut the rows."""
    m, n, k = shape.T
    work = [cut(MACHINES[gpu], dtype, sparse, m, n, k, 1) for sparse in (False, True)]
    return Block(gpu, dtype, family, shape, seconds, work)


def fastest(path: Path) -> dict[tuple[int, int, int], float]:
    """Read one search of a library: microseconds of the best algorithm for each (M, N, K); zeros are failed runs."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["lat_us_1"] and float(row["lat_us_1"]) > 0]
    return {(int(row["M"]), int(row["N"]), int(row["K"])): float(row["lat_us_1"]) for row in rows}


def read(source: Path) -> list[Block]:
    """Read the searches of a clone, each shape that both libraries have run."""
    folders = [source / "slidesparse/benchmark_kernel" / side / "alg_search_results" for side in SIDES]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise SystemExit(f"{missing[0]} is missing: clone https://github.com/bcacdwk/vllmbench and give its path")
    found = []
    for gpu, name in NAMES.items():
        for dtype, kind in DTYPES.items():
            rows: list[tuple[str, tuple[int, int, int], float, float]] = []
            for path in sorted(folders[0].glob(f"{gpu}_cc*_py312_*/{dtype}/alg_search_*.csv")):
                if "_out-" in path.parts[-3]:
                    continue
                other = folders[1] / path.parts[-3] / dtype / f"{path.stem}_2_4.csv"
                dense, sparse = fastest(path), fastest(other) if other.exists() else {}
                family = path.stem.removeprefix("alg_search_").removesuffix("-INT8")
                rows += [(family, shape, dense[shape], sparse[shape]) for shape in dense if shape in sparse]
            if rows:
                families, shapes, *sides = zip(*rows, strict=True)
                seconds = np.array(sides) * 1e-6
                found.append(block(name, kind, np.array(families), np.array(shapes, dtype=float), seconds))
    return found


def residuals(blocks: Sequence[Block], fitted: Fitted) -> np.ndarray:
    """Logarithms of predicted over measured, those of the speed-ups, and how far a speed-up lies on the wrong side.

    The rows where 2:4 wins and those where it loses weigh the same in the last; ties count in neither.
    """
    errors = np.concatenate([np.log(part.predict(fitted) / part.seconds) for part in blocks], axis=1)
    gain = np.concatenate([np.log(part.seconds[0] / part.seconds[1]) for part in blocks])
    told = gain + errors[0] - errors[1]
    weight = np.zeros_like(gain)
    for side in (gain > TIE, gain < -TIE):
        weight[side] = math.sqrt(len(gain) / 2 / max(int(side.sum()), 1))
    wrong = np.maximum(0, BEYOND - np.sign(gain) * told)
    return np.concatenate([errors.ravel(), SPREAD * (told - gain), WINNER * weight * wrong])


def constants(fitted: Fitted) -> list[str]:
    """List the names of what `fit` changes, "launch:b200" for one of a GPU; the margin follows from the others."""
    found = []
    for entry in dataclasses.fields(fitted):
        value = getattr(fitted, entry.name)
        found += [entry.name] if isinstance(value, float) else [f"{entry.name}:{gpu}" for gpu in value]
    return [name for name in found if name != "margin"]


def packed(fitted: Fitted) -> np.ndarray:
    """Return the logarithms of the constants."""
    parts = [name.partition(":") for name in constants(fitted)]
    return np.log([getattr(fitted, name)[gpu] if gpu else getattr(fitted, name) for name, _, gpu in parts])


def unpacked(fitted: Fitted, logs: np.ndarray) -> Fitted:
    """Return the constants of such logarithms, none beyond what it can be."""
    values: dict[str, Any] = {}
    for place, log in zip(constants(fitted), logs, strict=True):
        name, _, gpu = place.partition(":")
        value = min(float(np.exp(log)), MOST.get(name, math.inf))
        values[name] = {**values.get(name, {}), gpu: value} if gpu else value
    return dataclasses.replace(fitted, **values)


def fit(blocks: Sequence[Block], start: Fitted, steps: int = STEPS) -> Fitted:
    """Fit by Levenberg-Marquardt to residuals r that count as sqrt(1 + (r / SMALL)^2), and take the best margin."""
    gpus = {part.gpu for part in blocks}
    known = {name: {g: v for g, v in getattr(start, name).items() if g in gpus} for name in GPU}
    start = dataclasses.replace(start, **known)
    at, damping = packed(start), 0.1

    def priced(logs: np.ndarray) -> tuple[float, np.ndarray]:
        found = residuals(blocks, unpacked(start, logs))
        return float(np.sqrt(1 + np.square(found / SMALL)).sum()), found

    cost, found = priced(at)
    for _ in range(steps):
        moves = np.eye(len(at)) * 1e-3
        slopes = np.stack([(priced(at + move)[1] - found) / 1e-3 for move in moves], axis=1)
        weights = 1 / np.sqrt(1 + np.square(found / SMALL))
        square, push = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * found)
        before = cost
        for _ in range(6):
            shift = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -push)
            trial, there = priced(at + np.clip(shift, -0.5, 0.5))
            if trial < cost:
                at, cost, found, damping = at + np.clip(shift, -0.5, 0.5), trial, there, damping / 3
                break
            damping *= 4
        if before - cost < 1e-4 * before:
            break
    fitted = unpacked(start, at)
    print(f"  {sum(len(part.family) for part in blocks)} rows, cost {cost:.1f}", flush=True)
    return dataclasses.replace(fitted, margin=margin([(part, part.predict(fitted)) for part in blocks]))


Prediction = tuple[Block, np.ndarray]


def gains(rows: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
    """Speed-ups measured and predicted, ties left out."""
    gain = np.concatenate([part.seconds[0] / part.seconds[1] for part, _ in rows])
    told = np.concatenate([seconds[0] / seconds[1] for _, seconds in rows])
    clear = np.abs(gain - 1) > TIE
    return gain[clear], told[clear]


def balanced(gain: np.ndarray, told: np.ndarray, least: float) -> tuple[float, float]:
    """How often a win is told as one, and a loss."""
    return float(np.mean(told[gain > 1] >= least)), float(np.mean(told[gain < 1] < least))


def margin(rows: Sequence[Prediction]) -> float:
    """Return the middle of the margins that tell the winner best."""
    gain, told = gains(rows)
    tried = np.arange(1, 1.4, 0.01)
    rates = np.array([sum(balanced(gain, told, least)) for least in tried])
    return float(np.median(tried[rates > rates.max() - 0.004]))


def judge(rows: Sequence[Prediction], margins: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of |predicted / measured - 1|, and how often the winner is told, ties left out."""
    errors = np.concatenate([np.abs(told / part.seconds - 1).ravel() for part, told in rows])
    few = np.concatenate([np.tile(part.shape[:, 0] <= FEW, 2) for part, _ in rows])
    clear = [(part, told / np.array([[least], [1]])) for (part, told), least in zip(rows, margins, strict=True)]
    gain, told = gains(clear)
    won, lost = balanced(gain, told, 1) if (gain > 1).any() and (gain < 1).any() else (math.nan, math.nan)
    return {
        "times": len(errors),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "median_few": float(np.median(errors[few])) if few.any() else math.nan,
        "p90_few": float(np.quantile(errors[few], 0.9)) if few.any() else math.nan,
        "sparse_wins": int((gain > 1).sum()),
        "sparse_loses": int((gain < 1).sum()),
        "wins_told": won,
        "losses_told": lost,
        "balanced_accuracy": (won + lost) / 2,
    }


def sampled(blocks: Sequence[Block]) -> list[Block]:
    """Take every third row: what a fit sees."""
    return [part.only(np.arange(len(part.family)) % EVERY == 0) for part in blocks]


def left_out(blocks: Sequence[Block], part: Sequence[tuple[Block, Block]]) -> tuple[list[Prediction], float]:
    """Fit to the first of each pair, and predict the second."""
    fitted = fit(sampled([seen for seen, _ in part if len(seen.family)]), START)
    return [(unseen, unseen.predict(fitted)) for _, unseen in part if len(unseen.family)], fitted.margin


def folds(blocks: Sequence[Block], names: Sequence[str], mask: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Judge each part on a fit that has not seen it, and all of them together."""
    each, rows, margins = {}, [], []
    for name in names:
        pairs = [(part.only(~mask(part, name)), part.only(mask(part, name))) for part in blocks]
        found, least = left_out(blocks, pairs)
        each[name] = judge(found, [least] * len(found)) | {"margin": least}
        rows, margins = rows + found, margins + [least] * len(found)
    return each, judge(rows, margins)


def main() -> None:
    """Fit, judge, print the tables and write the record."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    target = Path(sys.argv[2] if len(sys.argv) > 2 else "experiments/records/hardware/gemm.json")
    blocks = read(Path(sys.argv[1]))
    families = sorted({str(name) for part in blocks for name in part.family})
    everything = fit(sampled(blocks), START)
    print(everything)
    record: dict[str, Any] = {"fitted": {e.name: getattr(everything, e.name) for e in dataclasses.fields(everything)}}
    record["fitted"] |= {name: dict(record["fitted"][name]) for name in GPU}
    known = [(part, part.predict(everything)) for part in blocks]
    record["seen"] = judge(known, [everything.margin] * len(known))
    record["blocks"] = {f"{row[0].gpu} {row[0].dtype}": judge([row], [everything.margin]) for row in known}
    kinds = {
        "families": (families, lambda part, name: part.family == name),
        "gpus": (list(NAMES.values()), lambda part, name: np.full(len(part.family), part.gpu == name)),
    }
    for kind, (names, mask) in kinds.items():
        record[kind], record[f"unseen_{kind}"] = folds(blocks, names, mask)
    measure.write_json(target, _without_nan(record))
    tables = {**record["families"], **record["gpus"]}
    for name, row in (tables | {key: record[key] for key in ("seen", "unseen_families", "unseen_gpus")}).items():
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()

"""How far is twofour.hardware from published GEMM times? Fits its constants, leaves families and GPUs out.

python experiments/hardware.py [record, experiments/records/hardware/gemm.json]

Fits: all rows (the constants of the package), each model family left out, each GPU left out; the last two are judged on
what they have not seen. A GPU that was left out has none of the constants that each GPU has for itself.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twofour import measure
from twofour.demo.data import data_folder
from twofour.hardware import MACHINES, Fitted, cut, price
from twofour.hardware.fitted import GPU

NAMES = {"A100": "a100-pcie", "H100": "h100-pcie", "B200": "b200", "RTX4090": "rtx-4090"}
DTYPES = {"BF16": "bfloat16", "FP16": "float16", "FP8": "float8", "INT8": "int8"}
FAMILIES = ("BitNet-2B", "Llama3.2-1B", "SQUARE")
TIE, ODD, STEPS, EVERY, WINNER = 0.03, 0.25, 20, 2, 1.0
MOST = {"cache": 1, "memory": 1, "quantized": 1, "sparse_quantized": 1, "issue": 1.1, "sparse_issue_async": 1.1}
"""Constants that cannot be more: shares of a whole; clocks may stand a tenth above the published peak's."""
MOST |= {"sustained": 1.5, "sparse_sustained": 1.5}  # far from any limit: larger ones cannot be told apart
UNSEEN = ("unseen_shapes", "unseen_gpus")
START = Fitted(
    launch=dict.fromkeys(NAMES.values(), 5e-6),
    sparse_launch=dict.fromkeys(NAMES.values(), 1e-6),
    sustained=dict.fromkeys(NAMES.values(), 0.8),
    sparse_sustained=dict.fromkeys(NAMES.values(), 0.7),
    **{"tile": 2e-7, "sparse_tile": 2e-7, "split": 5e-6, "load_sync": 64.0, "load_async": 96.0, "step_sync": 3e-9},
    **{"memory": 0.8, "cache": 0.5, "load_energy": 2e-11, "float8_energy": 1.0, "int8_energy": 1.0},
    **{"int8_energy_sync": 1.0, "quantized": 0.5, "sparse_quantized": 0.5, "issue": 1.0, "sparse_issue_async": 0.8},
)
"""Where every fit starts: guesses that no measured time entered."""


@dataclasses.dataclass
class Block:
    """The rows of one GPU, type and side: seconds measured, and their work."""

    gpu: str
    dtype: str
    sparse: bool
    family: np.ndarray
    shape: np.ndarray
    seconds: np.ndarray
    work: Any = None

    def predict(self, fitted: Fitted) -> np.ndarray:
        """Seconds of each row."""
        machine = MACHINES[self.gpu]
        return price(self.work, machine, self.dtype, self.sparse, cold=False, fitted=fitted).seconds

    def only(self, keep: np.ndarray) -> Block:
        """Some of the rows."""
        return block(self.gpu, self.dtype, self.sparse, self.family[keep], self.shape[keep], self.seconds[keep])

    @property
    def odd(self) -> bool:
        """No row reaches a quarter of the published peak: the library does not use the unit, so no physics fits."""
        rate = 2 * self.shape.prod(1) / self.seconds / MACHINES[self.gpu].peak(self.dtype, sparse=self.sparse)
        return bool(rate.max() < ODD)


def block(gpu: str, dtype: str, sparse: bool, family: np.ndarray, shape: np.ndarray, seconds: np.ndarray) -> Block:
    """Cut the rows."""
    m, n, k = shape.T
    return Block(gpu, dtype, sparse, family, shape, seconds, cut(MACHINES[gpu], dtype, sparse, m, n, k, 1))


def read(path: Path) -> list[Block]:
    """Read the table, dense and sparse rows of each GPU and type."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    found = []
    for gpu, dtype in dict.fromkeys((row["gpu"], row["dtype"]) for row in rows):
        some = [row for row in rows if (row["gpu"], row["dtype"]) == (gpu, dtype)]
        family = np.array([row["model"] for row in some])
        shape = np.array([[float(row[axis]) for axis in "MNK"] for row in some])
        for sparse, column in ((False, "dense_us"), (True, "sparse24_us")):
            seconds = np.array([float(row[column]) for row in some]) * 1e-6
            found.append(block(NAMES[gpu], DTYPES[dtype], sparse, family, shape, seconds))
    return found


def loss(blocks: Sequence[Block], fitted: Fitted) -> float:
    """Mean absolute logarithm of predicted over measured, with half the speed-up's and WINNER times how far it errs.

    Large errors weigh more. A speed-up errs by how far it lies on the wrong side of 1; the rows where sparse wins and
    those where it loses weigh the same in all.
    """
    errors = [np.log(part.predict(fitted) / part.seconds) for part in blocks]
    told, true = [], []
    for one, two, dense, sparse in zip(blocks, blocks[1:], errors, errors[1:], strict=False):
        if (one.gpu, one.dtype, two.sparse) == (two.gpu, two.dtype, True):
            true.append(np.log(one.seconds / two.seconds))
            told.append(true[-1] + dense - sparse)
    gain, said, error = np.concatenate(true), np.concatenate(told), np.abs(np.concatenate(errors))
    wrong = np.maximum(0, TIE - np.sign(gain) * said)
    sides = [float(wrong[side].mean()) for side in (gain > TIE, gain < -TIE) if side.any()]
    spread = float(np.abs(said - gain).mean())
    return float(np.mean(error + 0.5 * np.minimum(error, 1) ** 2)) + 0.5 * spread + WINNER * sum(sides) / len(sides)


def old_value(fitted: Fitted, name: str, gpu: str) -> float:
    """Return one constant."""
    value = getattr(fitted, name)
    return value[gpu] if gpu else value


def changed(fitted: Fitted, name: str, factor: float) -> Fitted | None:
    """Multiply one constant, "launch:b200" for one of a GPU; None where it would leave its range."""
    name, _, gpu = name.partition(":")
    old = getattr(fitted, name)
    value = {**old, gpu: old[gpu] * factor} if gpu else old * factor
    if old_value(fitted, name, gpu) * factor > MOST.get(name, math.inf):
        return None
    return dataclasses.replace(fitted, **{name: value})


def constants(fitted: Fitted) -> list[str]:
    """List the names of what is fitted."""
    found = []
    for entry in dataclasses.fields(fitted):
        value = getattr(fitted, entry.name)
        found += [entry.name] if isinstance(value, float) else [f"{entry.name}:{gpu}" for gpu in value]
    return found


def fit(blocks: Sequence[Block], start: Fitted, steps: int = STEPS) -> Fitted:
    """Fit by coordinates: each constant up or down by a step that grows where it helps and shrinks where not."""
    gpus = {part.gpu for part in blocks}
    start = dataclasses.replace(
        start, **{name: {g: v for g, v in getattr(start, name).items() if g in gpus} for name in GPU}
    )
    step, best = dict.fromkeys(constants(start), 0.2), loss(blocks, start)
    for _ in range(steps):
        for name in step:
            for sign in (1, -1):
                trial = changed(start, name, math.exp(sign * step[name]))
                if trial is not None and (found := loss(blocks, trial)) < best - 1e-7:
                    start, best, step[name] = trial, found, step[name] * 1.4
                    break
            else:
                step[name] *= 0.5
        if max(step.values()) < 0.003:
            break
    print(f"  loss {best:.4f}", flush=True)
    return start


def sampled(blocks: Sequence[Block]) -> list[Block]:
    """Take every second row, without the blocks that are odd: what a fit sees."""
    return [part.only(np.arange(len(part.seconds)) % EVERY == 0) for part in blocks if not part.odd]


Prediction = tuple[Block, np.ndarray]


def predicted(blocks: Sequence[Block], fitted: Fitted) -> list[Prediction]:
    """Each block and its predicted seconds, without the odd ones."""
    return [(part, part.predict(fitted)) for part in blocks if not part.odd]


def judge(rows: Sequence[Prediction]) -> dict[str, float]:
    """Median and 90th percentile of |predicted / measured - 1|, and how often the winner is told, ties left out."""
    errors = np.concatenate([np.abs(told / part.seconds - 1) for part, told in rows])
    won, lost = [], []
    for (one, dense), (two, sparse) in itertools.pairwise(rows):
        if (one.gpu, one.dtype, two.sparse) == (two.gpu, two.dtype, True):
            gain, said = one.seconds / two.seconds, dense / sparse
            won += list(said[gain > 1 + TIE] > 1)
            lost += list(said[gain < 1 - TIE] < 1)
    rates = [float(np.mean(side)) for side in (won, lost) if side]
    return {
        "times": len(errors),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "sparse_wins": len(won),
        "sparse_loses": len(lost),
        "balanced_accuracy": sum(rates) / len(rates) if rates else float("nan"),
    }


def parted(blocks: Sequence[Block], family: str) -> tuple[list[Block], list[Block]]:
    """Split the rows into those of the other families and those of one."""
    pairs = [(part.only(part.family != family), part.only(part.family == family)) for part in blocks if not part.odd]
    return [seen for seen, _ in pairs], [unseen for _, unseen in pairs if len(unseen.seconds)]


def main() -> None:
    """Fit, judge, print the tables and write the record."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "experiments/records/hardware/gemm.json")
    blocks = read(data_folder() / "gpu_gemm" / "gemm.csv")
    record: dict[str, Any] = {"odd": [[part.gpu, part.dtype, part.sparse] for part in blocks if part.odd]}
    record["families"], record["gpus"] = {}, {}
    everything = fit(sampled(blocks), START)
    print(everything)
    record["fitted"] = {entry.name: getattr(everything, entry.name) for entry in dataclasses.fields(everything)}
    record["fitted"] |= {name: dict(record["fitted"][name]) for name in GPU}
    known = predicted(blocks, everything)
    record["seen"] = judge(known)
    record["blocks"] = {
        f"{row[0].gpu} {row[0].dtype} {'2:4' if row[0].sparse else 'dense'}": judge([row]) for row in known
    }
    shapes: list[Prediction] = []
    for family in FAMILIES:
        seen, unseen = parted(blocks, family)
        rows = predicted(unseen, fit(sampled(seen), START))
        record["families"][family], shapes = judge(rows), shapes + rows
    boards: list[Prediction] = []
    for gpu in NAMES.values():
        seen, unseen = [[part for part in blocks if (part.gpu == gpu) == left] for left in (False, True)]
        rows = predicted(unseen, fit(sampled(seen), START))
        record["gpus"][gpu], boards = judge(rows), boards + rows
    record |= {"unseen_shapes": judge(shapes), "unseen_gpus": judge(boards)}
    measure.write_json(target, _without_nan(record))
    tables = {**record["families"], **record["gpus"], **{key: record[key] for key in ("seen", *UNSEEN)}}
    for name, row in tables.items():
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in row.values()) + " |")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()

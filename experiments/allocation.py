"""Does an allocated recipe beat one pattern everywhere at the same density or time? resnet20, CIFAR-10, one-shot.

python experiments/allocation.py [samples of the training set, 1000] [folder for records and figures, build/allocation]
"""

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import twofour
from tasks.cifar10 import Cifar10
from twofour.allocation import Allocation, Budget, Sensitivities, allocate, plot, sensitivity, timed, uniform

SAMPLES, OUT = int([*sys.argv, 1000][1]), Path(sys.argv[2] if len(sys.argv) > 2 else "build/allocation")
LEGAL, OTHERS, RECORDS = ("dense", "2:4", "1:4"), ("4:8", "3:4"), OUT / f"sensitivities-{SAMPLES}.json"


def batches(images: Tensor, labels: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Cut the first images and labels into batches of 250."""
    return list(zip(images[:count].split(250), labels[:count].split(250), strict=True))


def report(name: str, row: Allocation) -> Allocation:
    """Prune a copy by the recipe and print its accuracy on the test images."""
    model = copy.deepcopy(DENSE)
    if any(pattern != "dense" for _, pattern in row.chosen):
        twofour.prune(model, row.recipe)
    with torch.inference_mode():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in TEST)
    print(f"| {name} | {row.density:.3f} | {row.latency:.2f} | {row.loss:.3f} | {right / 100:.2f} |", flush=True)
    return row


torch.set_num_threads(1)
TASK = Cifar10()
DATA, TEST, DENSE = batches(*TASK.train, SAMPLES), batches(*TASK.test, 10_000), TASK.network(0).eval()
if not RECORDS.exists():
    measured = sensitivity(DENSE, DATA, (*LEGAL, *OTHERS), loss=F.cross_entropy, samples=SAMPLES)
    timed(measured, DENSE, DATA[0][0][:8]).save(RECORDS)
found = Sensitivities.load(RECORDS)
times = [report(f"{name} everywhere", uniform(found, name)).latency or 0.0 for name in ("dense", "2:4", "4:8")]
legal, half = found.only(*LEGAL), Budget(latency=(times[0] + times[1]) / 2)
for kind in ("task", "error"):
    report(f"density 0.5, {', '.join(LEGAL)}, by {kind}", allocate(legal, Budget(density=0.5), loss=kind))
    by_density = report(f"density 0.5, all candidates, by {kind}", allocate(found, Budget(density=0.5), loss=kind))
    by_time = report(f"half of the time saved, by {kind}", allocate(legal, half, loss=kind))
    plot(found, OUT / f"allocation-density-{kind}.svg", chosen=by_density)
    plot(legal, OUT / f"allocation-latency-{kind}.svg", chosen=by_time)

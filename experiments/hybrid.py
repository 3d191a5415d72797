"""A curve from 2:4 to dense inside every layer of MiniLM, one-shot: Spearman on STS-B against milliseconds.

python experiments/hybrid.py [criterion, admm] [test pairs, 1379] [rounds of timing, 15; 0: none] [effort, full]
"""

import sys
import time

import torch
from torch import nn

import twofour
from tasks.minilm import encode, sorted_batches
from tasks.stsb import Stsb, spearman

CRITERION, PAIRS, ROUNDS, EFFORT = ([*sys.argv[1:], *("admm", "1379", "15", "full")[len(sys.argv) - 1 :]])[:4]
PATTERNS = ("2:4", "2:4+12.5%", "2:4+25%", "2:4+50%", "dense")
TASK = Stsb()


def embedded(model: nn.Module) -> torch.Tensor:
    """Return the vectors of the test sentences, both of a pair one after the other."""
    sentences = [sentence for pair in TASK.test[0][: int(PAIRS)] for sentence in pair]
    found = torch.empty(len(sentences), 384)
    with torch.inference_mode():
        for places, batch in sorted_batches(sentences, 64):
            found[places] = model(*batch)
    return found


torch.set_num_threads(1)
data, wanted = TASK.calibration(), embedded(TASK.network(0).eval())
example = encode([sentence for pair in TASK.test[0] for sentence in pair if len(sentence.split()) == 14][:8])
compiled: dict[str, nn.Module] = {}
for pattern in PATTERNS:
    model = TASK.network(0).eval()
    if pattern != "dense":
        given = {} if CRITERION == "magnitude" else {"data": data}
        twofour.prune(model, pattern, criterion=CRITERION, reconstruct=False, progress=False, **given)
    vectors = embedded(model)
    score = 100 * spearman((vectors[0::2] * vectors[1::2]).sum(-1), TASK.test[1][: int(PAIRS)])
    away = (1 - (vectors * wanted).sum(-1)).mean()
    print(f"{CRITERION} {pattern}: Spearman {score:.2f}, mean distance from the dense vectors {away:.5f}", flush=True)
    if int(ROUNDS):
        compiled[pattern] = twofour.compile(model, example, tokens=(example[0].numel(),), effort=EFFORT)
times: dict[str, list[float]] = {pattern: [] for pattern in compiled}
with torch.inference_mode():
    for _ in range(int(ROUNDS)):
        for pattern, model in compiled.items():
            for place in range(4):  # the first one warms up
                start = time.perf_counter()
                model(*example)
                if place:
                    times[pattern].append(time.perf_counter() - start)
for pattern, found in times.items():
    low, half = sorted(found)[len(found) // 4], sorted(found)[len(found) // 2]
    print(f"{pattern}: {1e3 * low:.3f} ms in the lower quartile, {1e3 * half:.3f} at the median", flush=True)

"""A curve from 2:4 to dense inside every layer, one-shot: what a task loses against measured milliseconds.

    python experiments/hybrid.py [--task stsb] [--criterion admm] [--dtype bfloat16] [--share] [--examples 500]
        [--rounds 31] [--effort quick] [--patterns 2:4 2:4+25% dense]

`stsb` is MiniLM and Spearman's correlation times 100, `cifar10` ResNet-20 and top-1 accuracy. Scores are those of the
pruned model in float32; milliseconds those of the compiled model in `--dtype`, all models in turns in one process,
one thread. `--compiled` scores the compiled models instead, rounding included. In int8 each token has a range of its
own. `--share` gives the layers that read one input the same dense groups.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import twofour
from tasks.cifar10 import Cifar10
from tasks.minilm import encode, sorted_batches
from tasks.stsb import Stsb, spearman

PATTERNS = ("2:4", "2:4+12.5%", "2:4+25%", "2:4+50%", "dense")


class Side(ABC):
    """A network and its test set.

    Attributes:
        network: Returns a fresh dense network in evaluation mode.
        data: Calibration data.
        example: What the compiled network is timed on.
        tokens: Token counts to measure besides the example's.
        unit: What a score is.
    """

    network: Callable[[], nn.Module]
    data: Any
    example: Any
    tokens: tuple[int, ...]
    unit: str

    @abstractmethod
    def outputs(self, model: nn.Module) -> Tensor:
        """Return what a model makes of the test set."""

    @abstractmethod
    def score(self, outputs: Tensor) -> float:
        """Return the task's score of outputs."""

    @abstractmethod
    def away(self, outputs: Tensor, dense: Tensor) -> float:
        """Return how far outputs are from the dense model's: mean of 1 - cosine."""


class Sentences(Side):
    """MiniLM on the STS Benchmark; timed on 8 sentences of 18 tokens.

    Args:
        pairs: Test pairs that are scored.
    """

    unit = "Spearman x 100"

    def __init__(self, pairs: int) -> None:
        self.task, self.pairs = Stsb(), pairs
        self.network = lambda: self.task.network(0).eval()
        self.data = self.task.calibration()
        said = (sentence for pair in self.task.test[0] for sentence in pair if len(sentence.split()) == 14)
        self.example = encode([next(said) for _ in range(8)])
        self.tokens = (self.example[0].numel(),)

    def outputs(self, model: nn.Module) -> Tensor:
        """Return the vectors of the test sentences, both of a pair one after the other."""
        sentences = [sentence for pair in self.task.test[0][: self.pairs] for sentence in pair]
        found = torch.empty(len(sentences), 384)
        for places, batch in sorted_batches(sentences, 64):
            found[places] = model(*batch).float()
        return found

    def score(self, outputs: Tensor) -> float:
        """Return Spearman's correlation times 100."""
        return 100 * spearman((outputs[0::2] * outputs[1::2]).sum(-1), self.task.test[1][: self.pairs])

    def away(self, outputs: Tensor, dense: Tensor) -> float:
        """Return the mean of 1 - cosine."""
        return float((1 - (outputs * dense).sum(-1)).mean())


class Images(Side):
    """ResNet-20 on CIFAR-10; timed on a batch of images.

    Args:
        count: Test images that are scored.
        batch: Images of a timed call.
    """

    unit = "accuracy %"

    def __init__(self, count: int, batch: int) -> None:
        self.task, self.count = Cifar10(), count
        self.network = lambda: self.task.network(0).eval()
        self.data = self.task.calibration()
        self.example = self.task.test[0][:batch].contiguous(memory_format=torch.channels_last)
        self.tokens = (1,)

    def outputs(self, model: nn.Module) -> Tensor:
        """Return the answers to the test images."""
        parts = self.task.test[0][: self.count].split(250)
        return torch.cat([model(part.contiguous(memory_format=torch.channels_last)) for part in parts])

    def score(self, outputs: Tensor) -> float:
        """Return the top-1 accuracy in per cent."""
        return 100 * float((outputs.argmax(1) == self.task.test[1][: self.count]).float().mean())

    def away(self, outputs: Tensor, dense: Tensor) -> float:
        """Return the mean of 1 - cosine."""
        return float((1 - torch.cosine_similarity(outputs, dense)).mean())


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("stsb", "cifar10"), default="stsb")
    parser.add_argument("--criterion", default="admm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--examples", type=int, default=0, help="0: all")
    parser.add_argument("--batch", type=int, default=16, help="images of a timed call")
    parser.add_argument("--rounds", type=int, default=15, help="of timing; 0: none")
    parser.add_argument("--effort", default="full")
    return parser.parse_args()


def pruned(side: Side, pattern: str, given: argparse.Namespace) -> nn.Module:
    """Return the network with a pattern."""
    model = side.network()
    if pattern == "dense":
        return model
    share = given.share and "+" in pattern
    criterion = given.criterion + (f"{',' if ':' in given.criterion else ':'}over=input" if share else "")
    data = {} if given.criterion == "magnitude" and not share else {"data": side.data}
    return twofour.prune(model, pattern, criterion=criterion, reconstruct=False, progress=False, **data)


def timed(models: dict[str, nn.Module], example: Any, rounds: int) -> dict[str, list[float]]:
    """Time models in turns: in each round four calls of each, of which the first one warms up."""
    times: dict[str, list[float]] = {name: [] for name in models}
    arguments = example if isinstance(example, tuple) else (example,)
    for _ in range(rounds):
        for name, model in models.items():
            for place in range(4):
                start = time.perf_counter()
                model(*arguments)
                if place:
                    times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Print a line for each pattern, then the times of all."""
    given = options()
    torch.set_num_threads(1)
    if given.task == "stsb":
        side: Side = Sentences(given.examples or 1379)
    else:
        side = Images(given.examples or 10_000, given.batch)
    compiled: dict[str, nn.Module] = {}
    with torch.inference_mode():
        dense = side.outputs(side.network())
    for pattern in given.patterns:
        model = pruned(side, pattern, given)
        if given.rounds or given.compiled:
            options_ = {"dtype": given.dtype, "tokens": side.tokens, "effort": given.effort}
            compiled[pattern] = twofour.compile(model, side.example, **options_)
        with torch.inference_mode():
            outputs = side.outputs(compiled[pattern] if given.compiled else model)
        score, away = side.score(outputs), side.away(outputs, dense)
        what = f"{given.criterion}{' shared' if given.share else ''} {pattern}"
        print(f"{what}: {side.unit} {score:.2f}, mean distance from the dense outputs {away:.5f}", flush=True)
    with torch.inference_mode():
        times = timed(compiled, side.example, given.rounds)
    for pattern, found in times.items():
        if found:
            low, half = sorted(found)[len(found) // 4], sorted(found)[len(found) // 2]
            print(f"{given.dtype} {pattern}: {1e3 * low:.3f} ms lower quartile, {1e3 * half:.3f} median", flush=True)


if __name__ == "__main__":
    main()

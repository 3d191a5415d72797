"""Random numbers of a run: an epoch's data order follows from (seed, epoch) alone, whatever the model draws.

Data and model draw from separate streams. A sparse run and its control therefore see the same batches in the
same order, and a run resumed in mid-epoch replays the data stream and puts the model's stream back.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def derive(seed: int, epoch: int, purpose: str) -> int:
    """A seed for one purpose in one epoch: 63 bits of a hash, so that near seeds give unrelated streams."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def capture(*, devices: bool = True) -> State:
    """States of the global generators of torch, numpy and Python, and of CUDA where it is in use."""
    state: State = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: State) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_everything(seed: int, *, devices: bool = True) -> None:
    """Seed the global generators of torch, numpy and Python; CUDA's too unless `devices` is false."""
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Stream:
    """A random stream of its own: inside `with stream:` the global generators draw from it, and only there.

    Only the CPU generators are exchanged, because it happens once per batch: 0.15 ms there and back.
    """

    def __init__(self, seed: int) -> None:
        outer = capture(devices=False)
        seed_everything(seed, devices=False)
        self._own = capture(devices=False)
        restore(outer)

    def __enter__(self) -> Stream:
        self._outer = capture(devices=False)
        restore(self._own)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._own = capture(devices=False)
        restore(self._outer)


@contextmanager
def undisturbed(loader: object = None) -> Iterator[None]:
    """Leave the global generators, and those the loader holds, as they were found."""
    held = [(generator, generator.get_state()) for generator in generators(loader)]
    outer = capture()
    try:
        yield
    finally:
        restore(outer)
        for generator, state in held:
            generator.set_state(state)


def generators(loader: object) -> list[torch.Generator]:
    """The torch generators that a DataLoader and its samplers hold, each once; of one that wraps another, both."""
    found = [getattr(owner, "generator", None) for owner in _owners(loader)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _owners(loader: object) -> list[object]:
    """Return a loader, its samplers, and those of the `loader` that it wraps, as `Taught` does, in a stable order."""
    found = list[object]()
    while loader is not None and not any(loader is other for other in found):
        batch_sampler = getattr(loader, "batch_sampler", None)
        found += [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        loader = getattr(loader, "loader", None)
    return found


def seed_loader(loader: object, seed: int, epoch: int) -> None:
    """Give the loader's own generators and samplers (`set_epoch` of distributed ones) this epoch's order."""
    for number, generator in enumerate(generators(loader)):
        generator.manual_seed(derive(seed, epoch, f"loader {number}"))
    for owner in _owners(loader):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def to_plain(state: State) -> State:
    """The state with numpy's and Python's words as tensors: a checkpoint of 600 numbers takes 2 ms more to read."""
    name, keys, position, has_gauss, cached = state["numpy"]
    version, words, gauss = state["python"]
    return {
        **state,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
    }


def from_plain(state: State) -> State:
    """The inverse of `to_plain`; checkpoints of old hold Python's words as numbers."""
    name, keys, position, has_gauss, cached = state["numpy"]
    version, words, gauss = state["python"]
    words = words.tolist() if isinstance(words, torch.Tensor) else words
    return {
        **state,
        "numpy": (name, keys.numpy().astype(np.uint32), position, has_gauss, cached),
        "python": (version, tuple(words), gauss),
    }

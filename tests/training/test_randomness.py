"""States of the generators in a checkpoint: few objects to read, and what older files hold."""

from __future__ import annotations

import random

import numpy as np
import torch

from twofour.training import randomness


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_state_in_plain_parts_comes_back() -> None:
    with randomness.undisturbed():
        randomness.seed_everything(3)
        plain = randomness.to_plain(randomness.capture())
        want = draws()
        randomness.restore(randomness.from_plain(plain))
        assert draws() == want
    assert all(isinstance(plain[name][1], torch.Tensor) for name in ("numpy", "python"))


def test_words_that_older_checkpoints_hold_as_numbers_are_read() -> None:
    with randomness.undisturbed():
        plain = randomness.to_plain(randomness.capture())
        want = draws()
        randomness.restore(randomness.from_plain({**plain, "python": (3, tuple(plain["python"][1].tolist()), None)}))
        assert draws() == want

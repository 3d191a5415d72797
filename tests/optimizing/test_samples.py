"""The user's data in two parts, and the example that is timed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from twofour.calibration import Batch
from twofour.errors import DataError
from twofour.optimizing.samples import example_of, parted, sizes_of, tokens_of, trimmed

MODEL = nn.Linear(4, 2)


def numbered(count: int) -> Tensor:
    return torch.arange(count).float()[:, None].expand(-1, 4)


def seen(batches: tuple[Batch, ...]) -> set[int]:
    return {int(row[0]) for batch in batches for row in batch.inputs}


@pytest.mark.parametrize("size", [2, 5, 64])
def test_no_sample_is_on_both_sides(size: int) -> None:
    found = parted(MODEL, list(numbered(64).split(size)), 128)
    used, held = seen(found.used), seen(found.held)
    assert not used & held and used | held == set(range(64))
    assert 12 <= len(held) <= 20 and found.count == len(used)
    assert found.said == f"judged on {len(held)} samples held back, calibrated on {len(used)} others"
    assert seen(parted(MODEL, list(numbered(64).split(size)), 128).held) == held


def test_of_many_data_the_rest_is_held_back() -> None:
    found = parted(MODEL, list(numbered(200).split(2)), 20)
    assert found.count == 20 and len(seen(found.held)) == 180


def test_the_first_batch_may_tell_how_many_calibrate() -> None:
    found = parted(MODEL, list(numbered(200).split(2)), lambda first: 10 * first.samples)
    assert found.count == 20 and len(seen(found.held)) == 180


def test_targets_stay_with_their_samples() -> None:
    found = parted(MODEL, [(numbered(32), torch.arange(32))], 128)
    for batch in (*found.used, *found.held):
        assert torch.equal(batch.inputs[:, 0].long(), batch.target)


def test_too_few_data_are_refused() -> None:
    with pytest.raises(DataError, match="too few data"):
        parted(MODEL, [numbered(7)], 128)


def test_the_example_is_the_median_without_padding() -> None:
    ids, mask = torch.ones(8, 16, dtype=torch.long), torch.zeros(8, 16, dtype=torch.long)
    for row, length in enumerate((2, 3, 4, 9, 10, 14, 15, 16)):
        mask[row, :length] = 1
    batches = [Batch({"input_ids": ids, "attention_mask": mask, "scale": torch.ones(8)})]
    example = example_of(batches, 1)
    assert example["input_ids"].shape == example["attention_mask"].shape == (1, 10)
    assert example["scale"].shape == (1,) and tokens_of(example) == 10
    assert trimmed({"attention_mask": mask[:3], "input_ids": ids[:3]})["input_ids"].shape == (3, 4)
    assert Batch(example_of(batches, 4)).samples == 4
    with pytest.raises(DataError, match="no batch of the data has 9 samples"):
        example_of(batches, 9)


def test_kernels_are_measured_at_the_sizes_of_the_data() -> None:
    lengths = [3, 5, 5, 6, 7, 8, 9, 12, 20, 60, 64]
    batches = [
        Batch({"input_ids": torch.ones(1, 64, dtype=torch.long), "attention_mask": (torch.arange(64) < n).long()[None]})
        for n in lengths
    ]
    assert sizes_of(batches, 1) == (5, 8, 60)
    assert sizes_of([Batch(torch.randn(8, 3, 4, 4))], 2) == (2,)


def test_batches_whose_axes_do_not_tell_their_samples_are_parted_as_they_are() -> None:
    batches = [Batch((torch.full((16, 16, 4), float(number)), torch.ones(16, 16))) for number in range(3)]
    found = parted(MODEL, batches, 128)
    assert (len(found.used), len(found.held), found.count) == (2, 1, 32)
    assert example_of(batches, 16)[0].shape == (16, 16, 4)
    with pytest.raises(DataError, match=r"cannot be parted to hold some.*\n  got +one batch: 16 is the number"):
        parted(MODEL, batches[:1], 128)
    with pytest.raises(DataError, match="no batch of the data has 1 samples"):
        example_of(batches, 1)

"""What `data` may be: batches and pairs in every form, cut to the samples asked for."""

import math

import pytest
import torch
from torch import nn

from tests.turns import in_turn
from twofour import calibration
from twofour.calibration import Batch, take
from twofour.errors import DataError


class Two(nn.Module):
    def forward(self, a, b):
        return a + b


class Optional(nn.Module):
    def forward(self, a, b=None):
        return a


X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@in_turn(
    ("data", "inputs", "target"),
    [
        (X, X, None),
        ([X], X, None),
        ([(X, Y)], X, Y),
        ([[X]], (X,), None),
        ([{"a": X}], {"a": X}, None),
        ({"a": X}, {"a": X}, None),
        ([({"a": X}, Y)], {"a": X}, Y),
        ([((X, X), Y)], (X, X), Y),
    ],
)
def test_forms(data, inputs, target) -> None:
    (batch,) = take(Optional(), data, 100)
    torch.testing.assert_close(tuple(batch.inputs) if isinstance(batch.inputs, list) else batch.inputs, inputs)
    assert (batch.target is None) == (target is None)


def test_two_arguments_are_no_pair_where_the_model_needs_both() -> None:
    assert len(take(Two(), [(X, X)], 8)[0].inputs) == 2
    assert take(Two(), [(X, Y)], 8, paired=True)[0].inputs is X


def test_the_last_batch_is_cut_and_no_further_one_is_read() -> None:
    def endless():
        while True:
            yield {"a": X, "mask": torch.ones(4, 2)}, Y

    batches = take(Optional(), endless(), 6)
    assert [len(batch.inputs["a"]) for batch in batches] == [4, 2]
    assert len(batches[1].inputs["mask"]) == len(batches[1].target) == 2


def test_samples_of_a_list_are_spread_over_it() -> None:
    """The first ones may be all of a kind: sentences by where they come from, images by their class."""
    for count, samples in ((1, 3), (2, 3), (3, 5), (9, 12), (10, 40), (16, 15), (100, 50)):
        data = [torch.arange(4.0 * number, 4.0 * number + 4)[:, None] for number in range(count)]
        kept = torch.cat([batch.inputs for batch in take(nn.Identity(), data, samples)]).flatten()
        assert kept.tolist() == sorted(set(kept.tolist())) and len(kept) == min(samples, 4 * count), "each once"
        batches = kept.div(4, rounding_mode="floor").unique()
        if count >= 9:
            assert batches.diff().max() <= 2 * math.ceil(count / len(batches)), "no great gap"
        if samples >= 4 * count:
            assert torch.equal(kept, torch.arange(4.0 * count))
    (one,) = take(nn.Identity(), torch.arange(100.0)[:, None], 10)
    assert one.inputs.flatten().tolist() == [*range(0, 100, 10)]
    (masked,) = take(Two(), [{"a": X, "b": torch.ones(5)}], 2)
    assert masked.inputs["a"].tolist() == X[::2].tolist() and len(masked.inputs["b"]) == 5
    walked = take(nn.Identity(), iter([X, X + 100, X + 200]), 6)
    assert [batch.inputs[0, 0].item() for batch in walked] == [0, 100], "what can only be walked: the first"


class Encoder(nn.Module):
    def forward(self, input_ids, attention_mask=None, *, extra=None):
        return input_ids


def test_a_mask_among_positional_inputs_is_known_by_the_name_that_forward_has_for_it() -> None:
    """A loader of ((ids, mask), target): what the mask hides was counted, a third of the rows of short texts."""
    ids, mask = torch.ones(4, 2, dtype=torch.long), torch.tensor([[1, 0]]).repeat(4, 1)
    for data in ([((ids, mask), Y)], [Batch((ids, mask), Y)]):
        (batch,) = take(Encoder(), data, 3, paired=True)
        assert set(batch.inputs) == {"input_ids", "attention_mask"} and len(batch.target) == 3
        assert batch.tokens is not None and batch.tokens.sum() == 3
    assert isinstance(take(Encoder(), [(ids, mask, ids)], 4)[0].inputs, tuple), (
        "more than forward takes: the call tells"
    )
    assert isinstance(take(Two(), [Batch((ids, mask))], 4)[0].inputs, tuple), "no mask by these names"

    class Any(nn.Module):
        def forward(self, *attention_mask):
            return attention_mask[0]

    assert isinstance(take(Any(), [Batch((ids, mask))], 4)[0].inputs, tuple)


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("attention_mask", torch.tensor([[1, 0]]), [[True, False]]),
        ("src_key_padding_mask", torch.tensor([[False, True]]), [[True, False]]),
        ("key_padding_mask", torch.tensor([[0.0, float("-inf")]]), [[True, False]]),
        ("attention_mask", torch.ones(1, 1, 2, 2), None),
        ("tokens", torch.ones(1, 2), None),
    ],
)
def test_tokens_that_count(name: str, mask: torch.Tensor, expected) -> None:
    tokens = Batch({name: mask}).tokens
    assert (tokens.tolist() if tokens is not None else None) == expected
    assert Batch(X).tokens is None


@in_turn(
    ("data", "samples", "message"),
    [
        ([], 8, r"no calibration data\n  got +no batch\n.*\n  try +an iterator can be walked only once"),
        ("data.csv", 8, r"cannot be used\n  got +str of 8"),
        (3, 8, r"cannot be used\n  got +int"),
        ([["a", "b", "c"]], 8, r"holds no tensor\n  got +list of 3\n  wanted +inputs \(a tensor"),
        (
            X[:0],
            8,
            r"batch of the calibration data holds no samples\n  got +batch 1: shape \(0, 3\)\n  wanted.*\n  try",
        ),
        ([X, {"a": X[:0]}], 8, r"holds no samples\n  got +batch 2: shape \(0, 3\)"),
        ([X], 0, r"`samples` cannot be used\n  got +samples=0"),
    ],
)
def test_errors(data, samples: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        take(Optional(), data, samples)


def test_tokens_of_a_decoder_are_not_taken_for_those_of_the_encoder() -> None:
    mask, ids = torch.tensor([[1, 0]]), torch.zeros(1, 2, dtype=torch.long)
    assert Batch({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}).tokens is None
    longer = torch.zeros(1, 3, dtype=torch.long)  # told apart by shape
    found = Batch({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": longer}).tokens
    assert found is not None and found.tolist() == [[True, False]]


def test_a_batch_says_itself_what_is_what() -> None:
    for model in (Two(), Optional()):
        for paired in (True, False):
            (batch,) = take(model, [Batch((X, X))], 8, paired=paired)
            assert isinstance(batch.inputs, tuple) and batch.target is None
            (batch,) = take(model, Batch(X, Y), 2, paired=paired)
            assert len(batch.inputs) == len(batch.target) == 2


@pytest.mark.parametrize("item", [((X, X), None), ({"a": X, "b": X}, Y), ({"a": X, "b": X}, None)])
def test_pairs_of_a_model_that_needs_two_arguments(item) -> None:
    (batch,) = take(Two(), [item], 100)
    assert len(batch.inputs) == 2 and batch.target is item[1]
    (again,) = take(Two(), [batch], 100)
    assert again.inputs is batch.inputs and again.target is batch.target


def test_what_could_be_a_pair_and_two_arguments_is_refused() -> None:
    message = (
        r"could be a pair \(input, target\) as well as two arguments\n  got +a tuple of \(tuple of 2, Tensor\).*\n"
        r"  wanted +one reading\n  try +twofour.calibration.Batch\(inputs, target\), or a dict"
    )
    with pytest.raises(DataError, match=message):
        take(Two(), [((X, X), Y)], 8)
    assert take(Two(), [((X, X), Y)], 8, paired=True)[0].target is Y
    assert take(Two(), [({"other": X}, X)], 8)[0].target is None  # no arguments of this forward: a dict as an argument


def test_a_fifth_is_held_back_and_judges_by_the_dense_answers() -> None:
    model = nn.Linear(4, 3)
    ten = [calibration.Batch(torch.full((2, 4), float(number))) for number in range(10)]
    used, held = calibration.hold_back(model, ten)
    assert [batch.inputs[0, 0].item() for batch in held.batches] == [4, 9] and len(used) == 8 and held.samples == 4
    (first,), held_of_one = calibration.hold_back(model, [calibration.Batch({"input": torch.randn(10, 4)})])
    assert (first.samples, held_of_one.samples) == (8, 2)
    few, both = calibration.hold_back(model, [calibration.Batch(torch.randn(3, 4))])
    assert few[0].samples == both.samples == 3, "too few to part: they serve both"
    assert held.lost(model) == 0
    with torch.no_grad():
        model.weight.mul_(2)
        model.bias.mul_(2)
    assert held.lost(model) == pytest.approx(1)
    many = [calibration.Batch(torch.randn(20, 4)) for _ in range(50)]
    used, held = calibration.hold_back(model, many)
    assert held.samples == 80 and sum(batch.samples for batch in used) == 920, "no more judge than are needed"

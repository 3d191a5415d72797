"""What `data` may be: batches and pairs in every form, cut to the samples asked for."""

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import twofour
from tests.turns import in_turn
from twofour import calibration, pruning
from twofour.calibration import Batch, part, pieces, take
from twofour.calibration.batches import some
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


SQUARE, IDS, OTHERS = torch.randn(16, 16, 5), torch.ones(16, 16, dtype=torch.long), torch.ones(24, 16, 5)


@in_turn(
    ("inputs", "reason"),
    [
        ({"x": SQUARE, "mask": torch.ones(16, 16)}, "16 is the number"),  # of (tokens, tokens)
        ({"x": SQUARE, "position": torch.arange(16)}, "16 is the number"),
        ((IDS, torch.ones(16, 16, dtype=torch.bool)), "16 is the number"),
        ({"x": SQUARE, "position_ids": torch.arange(16)}, "16 is the number"),
        ({"x": torch.ones(16, 4), "adjacency": torch.ones(16, 16)}, "16 is the number"),
        ({"position": torch.arange(16), "x": OTHERS}, "16 is the number"),
        ({"mask": torch.ones(16, 16), "x": OTHERS}, "16 is the number"),
        ({"table": torch.ones(10), "x": OTHERS}, "10 and 24"),
        ({"x": torch.ones(16, 4), "edges": torch.ones(2, 30, dtype=torch.long)}, "16 and 2"),
        (SQUARE, ""),
        ({"x": SQUARE}, ""),
        ({"x": OTHERS, "mask": torch.ones(16, 16)}, ""),
        ({"x": OTHERS, "position": torch.arange(16)}, ""),
        ({"x": OTHERS, "position": torch.arange(16)[None], "constants": torch.ones(9, 4)}, ""),
        ({"scale": torch.tensor(2.0), "x": OTHERS}, ""),
        ({"input_ids": IDS, "attention_mask": IDS, "token_type_ids": IDS, "labels": torch.ones(16)}, ""),
        ({"x": SQUARE, "key_padding_mask": IDS == 0, "nested": {"labels": [torch.ones(16)]}}, ""),
        ({"input_ids": IDS, "decoder_input_ids": IDS}, ""),
        ({"x": torch.ones(1, 1), "y": torch.ones(1)}, ""),
        ({"x": torch.ones(0, 3), "y": torch.ones(0)}, ""),
    ],
)
def test_a_batch_whose_axes_do_not_tell_its_samples_is_taken_whole(inputs, reason: str) -> None:
    """A mask (tokens, tokens) was cut as if it counted samples where a batch had as many: no model ran on the rest."""
    batch = Batch(inputs, torch.arange(24), 1)
    assert reason in batch.whole if reason else not batch.whole
    if reason:
        assert part(batch, 0, 3) is some(batch, 3) is batch and pieces(batch, 3) == [batch]
        assert take(Optional(), [batch], 3)[0] is batch
    elif batch.samples > 1:
        for cut in (part(batch, 0, 3), some(batch, 3), pieces(batch, 3)[0], *take(Optional(), [batch], 3)):
            assert cut.samples == 3
            shapes = zip(tree_leaves(cut.inputs), tree_leaves(inputs), strict=True)
            assert all(new.shape == (3, *old.shape[1:]) or torch.equal(new, old) for new, old in shapes)
        assert sum(piece.samples for piece in pieces(batch, 5)) == batch.samples


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.position = nn.Linear(8, 8), nn.Embedding(16, 8)

    def forward(self, x, mask, position):
        return mask @ self.linear(x + self.position(position))


def test_a_model_runs_on_batches_of_as_many_samples_as_tokens(caplog: pytest.LogCaptureFixture) -> None:
    mask, position = torch.ones(16, 16).tril(), torch.arange(16)
    data = [{"x": torch.randn(16, 16, 8), "mask": mask, "position": position} for _ in range(6)]
    model = Masked()
    with caplog.at_level("INFO", logger="twofour"):
        twofour.prune(model, "2:4", data=data, samples=72, reconstruct=True, eligibility="any", progress=False)
    told = [record.message for record in caplog.records]
    whole = [line for line in told if "is taken whole: 16 is the number of its samples" in line]
    assert len(whole) == 1 and "calibrated on 80 samples" in told
    assert any(line.startswith("reconstructed: answers to 16 samples held back") for line in told)
    assert pruning.outcomes(model)[0].rows == 80 * 16
    with pytest.raises(DataError, match=r"held back to judge a reconstruction\n  got +2 batches, not to be cut: 16 is"):
        twofour.prune(Masked(), "2:4", data=data[:2], reconstruct=True, eligibility="any", progress=False)
    used, held = calibration.hold_back(model, [Batch(data[0])])
    assert used[0].samples == held.samples == 16


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


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 16), nn.Linear(16, 16)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return self.linear(self.embedding(input_ids))


def test_a_mask_that_is_taken_for_the_target_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A DataLoader of TensorDataset(ids, mask): the model never saw the mask, and padding counted as tokens."""
    ids, mask = torch.randint(1, 4, (8, 6)), torch.ones(8, 6, dtype=torch.long)
    mask[:, 2:] = 0
    loader = [[ids[:4], mask[:4]], [ids[4:], mask[4:]]]
    told = r"""`forward` has `attention_mask` in its place .*\{'input_ids': ..., 'attention_mask': ...\}, .*Batch\("""
    rows = []
    for data, warnings in (
        (loader, 1),
        ([Batch(*pair) for pair in loader], 0),
        ([{"input_ids": ids, "attention_mask": mask}], 0),
    ):
        caplog.clear()
        model = Padded()
        options = {"eligibility": "any", "progress": False, "reconstruct": False}
        twofour.prune(model, "2:4", data=data, **options)
        found = [record for record in caplog.records if re.search(told, record.message)]
        assert len(found) == warnings and all(record.levelname == "WARNING" for record in found)
        rows.append(pruning.outcomes(model)[0].rows)
    assert rows == [48, 48, 16], "as a target it hides nothing"


@in_turn(
    ("model", "pair", "told"),
    [
        (Padded(), (IDS, IDS == 1), True),
        (Padded(), (torch.ones(16, 16, 5), IDS.float()), True),
        (Padded(), (IDS, IDS + 1), False),  # classes of tokens
        (Padded(), (IDS, torch.ones(16)), False),
        (Padded(), (IDS, torch.ones(16, 15)), False),
        (Padded(), ((IDS, IDS), IDS), False),
        (Padded(), {"input_ids": IDS}, False),
        (Optional(), (IDS, IDS), False),  # no mask by its name
        (nn.Identity(), (IDS, IDS), False),
    ],
)
def test_what_may_be_a_mask_goes_by_name_shape_and_values(model, pair, told: bool, caplog) -> None:
    for again, number in ((pair, int(told)), (Batch(pair), 0)):
        caplog.clear()
        take(model, [again, again], 100)
        assert len(caplog.records) == number
    caplog.clear()
    take(model, [pair], 100, paired=True)
    assert not caplog.records, "a loss wants the target"


def test_a_padding_mask_in_floats_is_known_too(caplog: pytest.LogCaptureFixture) -> None:
    class Padding(nn.Module):
        def forward(self, x, src_key_padding_mask=None):
            return x

    hidden = torch.zeros(4, 3).masked_fill(torch.tensor([False, True, True]), float("-inf"))
    (batch,) = take(Padding(), [(torch.ones(4, 3, 5), hidden)], 4)
    assert "src_key_padding_mask" in caplog.text and batch.target is hidden


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
        (["a text", "another"], 8, r"holds no tensor\n.*\n.*\n +try +tokenise sentences, .* or TwoFourConfig\(data="),
        ([["a", "b"]], 8, "tokenise sentences"),
        ("texts.txt", 8, "tokenise sentences"),
        ([{"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}], 8, r'return_tensors="pt" has a tokenizer do it'),
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
    assert held.samples == 70 and sum(batch.samples for batch in used) == 930, "no more judge than are needed"


@in_turn("size, count, distinct", [(32, 128, 16), (32, 1024, 16), (32, 16, 3), (1, 4096, 64), (3, 1000, 22)])
def test_what_judges_is_spread_over_data_in_an_order(size: int, count: int, distinct: int) -> None:
    data = [calibration.Batch(torch.full((size, 4), number / (count - 1))) for number in range(count)]
    used, held = calibration.hold_back(nn.Linear(4, 3), data)
    places = [batch.inputs[0, 0].item() for batch in held.batches]
    assert len(places) == distinct and 64 <= held.samples <= 96 and places == sorted(places)
    gaps = [after - before for before, after in zip([0.0, *places], [*places, 1.0], strict=True)]
    assert max(gaps) < 2.1 / distinct, gaps
    assert held.samples + sum(batch.samples for batch in used) == size * count, "each sample is used or judges"


def test_a_batch_that_cannot_be_parted_judges_whole() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            assert mask.shape == (len(x), len(x))
            return super().forward(x)

    data = [calibration.Batch((torch.randn(40, 4), torch.zeros(40, 40)))] * 20
    used, held = calibration.hold_back(Masked(4, 3), data)
    assert held.samples == 80 and sum(batch.samples for batch in used) == 640 + 2 * 40


def test_few_of_many_batches_that_judge_are_spread_where_answers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.calibration.held.MOST_BYTES", 100)
    held = calibration.judged(nn.Linear(4, 3), [calibration.Batch(torch.full((2, 4), float(n))) for n in range(16)])
    assert [batch.inputs[0, 0].item() for batch in held.batches] == [0, 2, 4, 8, 12]

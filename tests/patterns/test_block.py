"""Block patterns: masks against brute force on odd sizes, gates that no block crosses, texts, and checks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.errors import PatternError
from twofour.patterns import Block, parse


def slow(scores: Tensor, pattern: Block) -> Tensor:
    """Block by block in Python: the blocks with the largest means stay, the first among equals."""
    rows, columns = scores.shape
    each = rows // pattern.parts
    tops = [
        (part * each + top, min(pattern.r, each - top))
        for part in range(pattern.parts)
        for top in range(0, each, pattern.r)
    ]
    places = [(top, tall, left) for top, tall in tops for left in range(0, columns, pattern.c)]
    means = [scores[top : top + tall, left : left + pattern.c].mean().item() for top, tall, left in places]
    kept = sorted(range(len(places)), key=lambda place: (-means[place], place))[
        : len(places) - pattern.zeros(len(places))
    ]
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    for top, tall, left in map(places.__getitem__, kept):
        keep[top : top + tall, left : left + pattern.c] = True
    return keep


@given(
    st.integers(1, 4), st.integers(1, 12), st.integers(1, 23), st.integers(1, 5), st.integers(2, 6), st.floats(0, 0.99),
    st.integers(),
)  # fmt: skip
def test_the_best_blocks_stay_also_the_smaller_ones_at_the_rim(parts, each, columns, r, c, sparsity, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    scores = torch.randint(0, 1 << 20, (parts * each, columns), generator=generator).double()
    pattern = Block(r, c, sparsity, parts)
    keep = pattern.project(scores)
    assert torch.equal(keep, slow(scores, pattern))
    assert pattern.check(scores * keep).ok
    assert torch.equal(pattern.project((scores * keep), absolute=True) & (scores != 0), keep & (scores != 0))


def test_positions_of_a_convolution_have_blocks_of_their_own() -> None:
    scores = torch.rand(6, 3, 2, 10, generator=torch.Generator().manual_seed(0))
    pattern = Block(4, 4, 0.5)
    keep = pattern.project(scores)
    blocks = pattern.blocks(keep)
    assert blocks.shape == (1, 2, 6, 3, 4, 4)
    used = blocks.flatten(-2).any(-1)
    assert int(used.sum()) == 18 and torch.equal(pattern.spread(used, (6, 3, 2, 10)), keep)


@pytest.mark.parametrize(("norm", "best"), [("max", 0), ("l1", 1), ("l2", 2), ("mean", 3)])
def test_norms_of_blocks(norm: str, best: int) -> None:
    weight = torch.tensor([[9.0, 0, 0, 0, -5, 5, 5, -5, 8, 6, 1, 1, 4.5, 4.5, 4.5, 4.5]])
    scores = Block(1, 4, 0.5).scores(weight, norm).flatten()
    assert int(scores.argmax()) == best
    assert scores[1] == pytest.approx({"max": 5, "l1": 5, "l2": 5, "mean": 0}[norm])


def test_a_smaller_block_is_ranked_by_its_mean() -> None:
    weight = torch.tensor([[2.0, 2, 2, 2, 3, 0]])  # the last block has two values, of mean 1.5
    assert Block(1, 4, 0.5).project(weight).tolist() == [[True] * 4 + [False] * 2]
    weight[0, 5] = 2
    assert Block(1, 4, 0.5).project(weight).tolist() == [[False] * 4 + [True] * 2]


def test_a_share_of_zeros_is_read_back_for_any_number_of_blocks() -> None:
    for blocks in (2, 3, 7, 999, 65536, 10**6 + 3):
        for zeros in {0, 1, blocks // 3, blocks - 1}:
            pattern = Block(16, 16, zeros / blocks)
            assert pattern.zeros(blocks) == zeros and parse(pattern.name) == pattern


def test_one_block_stays_whatever_the_share() -> None:
    assert int(Block(4, 4, 0.99).project(torch.rand(8, 8)).sum()) == 16


@pytest.mark.parametrize(
    "text", ["block:16x16@0.9", "block:8x1@0.5", "block:4x4@0", "block:1x32@0.987654321", "block:16x16@0.9/4"]
)
def test_texts_come_back(text: str) -> None:
    assert parse(text).name == text and parse(parse(text)) is parse(text)


def test_a_share_that_python_prints_in_full_is_rounded() -> None:
    assert parse(f"block:4x4@{2 / 3}") == Block(4, 4, 2 / 3) and parse(f"block:4x4@{2 / 3}").name.endswith(
        "@0.666666667"
    )


@in_turn(
    "text",
    ["block", "block:", "block:16x16", "block:16x16@", "block:16x16@1", "block:0x4@0.5", "block:1x1@0.5",
     "block:16x16@1.5", "block:16x16@-0.5", "block:16x16@0.9/0", "block:16x16@nan", "block:9999x1@0.5",
     "block:4x4@1e-3", "block:4x4@0.99999999999"],
)  # fmt: skip
def test_other_texts_are_refused_with_a_pattern_that_works(text: str) -> None:
    with pytest.raises(PatternError, match=r"block:16x16@0\.9") as caught:
        parse(text)
    assert caught.value.got and caught.value.wanted


def test_check_names_the_first_block_too_many() -> None:
    pattern = Block(2, 3, 0.5)
    weight = torch.zeros(4, 8)
    weight[0, 0] = weight[1, 7] = weight[3, 4] = 1
    assert pattern.check(weight).ok
    weight[2, 7] = -2
    found = pattern.check(weight)
    assert (found.groups, found.legal, found.first) == (6, 5, (2, 6)) and -2 in found.values


def test_nan_is_refused_and_rows_that_are_no_multiple_of_the_parts() -> None:
    with pytest.raises(PatternError, match="NaN"):
        Block(2, 2, 0.5).project(torch.full((4, 4), torch.nan))
    with pytest.raises(PatternError, match="multiple of 3"):
        Block(2, 2, 0.5, 3).project(torch.rand(4, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_block_crosses_a_gate(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = twofour.prune(kind(12, 10), "block:4x4@0.5", eligibility="any")
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    for name, mask in masks.of(model).items():
        assert mask.pattern.name == "block:4x4@0.5" + (f"/{gates}" if gates > 1 else "")
        for gate in mask.keep.view(gates, 10, -1):
            for top, left in itertools.product((0, 4, 8), range(0, gate.shape[1], 4)):
                block = gate[top : top + 4, left : left + 4]
                assert bool(block.all()) or not bool(block.any()), name


def test_masks_hold_while_training_and_are_found_again_in_the_weights() -> None:
    torch.manual_seed(0)
    model = twofour.prune(
        nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)), "block:8x4@0.8", eligibility="any"
    )
    optimiser = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(5, 24)).square().sum().backward()
        optimiser.step()
    kept = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    assert all(int((model.get_parameter(name) != 0).sum()) == 192 for name in kept)
    plain = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24))
    plain.load_state_dict(model.state_dict())
    found = masks.derive(plain, "block:8x4@0.8", eligibility="any")
    assert all(torch.equal(found[name].keep, keep) for name, keep in kept.items())

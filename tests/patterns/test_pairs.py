import torch

from twofour.patterns import parse


def test_pairs_are_kept_whole() -> None:
    pattern = parse("4:8-pairs")
    weight = torch.randn(16, 64)
    mask = pattern.project(weight, absolute=True)
    pairs = mask.view(16, -1, 4, 2)
    assert torch.equal(pairs[..., 0], pairs[..., 1])
    assert (pairs[..., 0].sum(-1) == 2).all()
    sums = weight.abs().view(16, -1, 4, 2).sum(-1)
    assert torch.equal(sums[pairs[..., 0]].view(16, -1, 2).sum(-1), sums.topk(2).values.sum(-1))


def test_check_wants_whole_pairs() -> None:
    pattern = parse("4:8-pairs")
    legal = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]])
    assert pattern.check(legal).ok
    three_pairs = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0]])
    found = pattern.check(three_pairs)
    assert (found.ok, found.first, found.groups) == (False, (0, 0), 1)

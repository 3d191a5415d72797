"""Reconstruction: nearer answers on data held back or the criterion's values to the bit, and masks hold either way."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import masks, reconstruction
from twofour.errors import DataError, RecipeError
from twofour.pruning import reconstruction_report


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks behind an embedding, and a head of scores; `fail` is called with the number of each forward pass."""

    def __init__(self, blocks: type[nn.Module] = Block, fail: Callable[[int], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(50, 32), nn.ModuleList(blocks(32) for _ in range(3))
        self.head = nn.Linear(32, 8)
        self.fail, self.calls = fail, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.fail is not None:
            self.fail(self.calls)
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(count: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (8, 6), generator=generator) for _ in range(count)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "BLOCK_STEPS", 30)
    monkeypatch.setattr(reconstruction, "MODEL_STEPS", 60)


def held(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_answers_come_nearer_and_masks_hold() -> None:
    dense = Stack()
    model = twofour.prune(copy.deepcopy(dense), "2:4", data=tokens(), progress=False)
    plain = twofour.prune(copy.deepcopy(dense), "2:4", data=tokens(), progress=False, reconstruct=False)
    report = reconstruction_report(model)
    assert report is not None and report.kept and report.after < 0.9 * report.before and "kept" in str(report)
    assert reconstruction_report(plain) is None
    for name, mask in masks.of(model).items():
        assert torch.equal(mask.keep, masks.of(plain)[name].keep), "the criterion's masks"
        assert not mask.parameter[~mask.keep].any() and mask.parameter[mask.keep].any()
    fresh = torch.randint(50, (64, 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        lost = [(each(fresh) - dense(fresh)).norm() for each in (model, plain)]
    assert lost[0] < lost[1], "on tokens that nobody saw"
    assert twofour.check(model, expect="2:4").ok


def test_what_is_neither_pruned_nor_flat_stays_to_the_bit() -> None:
    before = Stack()
    model = twofour.prune(copy.deepcopy(before), {"blocks.*": "2:4"}, data=tokens(), progress=False)
    assert reconstruction_report(model).kept  # pyright: ignore[reportOptionalMemberAccess]
    for name in ("table.weight", "head.weight"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    changed = ("blocks.0.norm.weight", "blocks.0.up.bias", "head.bias")
    assert not any(torch.equal(model.get_parameter(name), before.get_parameter(name)) for name in changed)
    assert all(p.grad is None and p.requires_grad for p in model.parameters()) and model.training


def test_where_it_is_no_better_the_values_of_the_criterion_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "BLOCK_RATE", 30.0)
    monkeypatch.setattr(reconstruction, "MODEL_RATE", 30.0)
    model = twofour.prune(Stack(), "2:4", data=tokens(), progress=False)
    report = reconstruction_report(model)
    assert report is not None and not report.kept and report.after == report.before and "no smaller" in str(report)
    assert same(held(model), held(twofour.prune(Stack(), "2:4", data=tokens(), reconstruct=False)))


def calls_before_reconstruction() -> int:
    counted = Stack()
    twofour.prune(counted, "2:4", data=tokens(), progress=False, reconstruct=False)
    return counted.calls


@pytest.mark.parametrize("into", [8, 40, 75, 100])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_the_model_as_it_was(into: int, error: type[BaseException]) -> None:
    last = calls_before_reconstruction() + into

    def fail(number: int) -> None:
        if number == last:
            raise error("now")

    model = Stack(fail=fail)
    before, places = held(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(DataError if error is ValueError else error):
        twofour.prune(model, "2:4", data=tokens(), progress=False)
    assert same(held(model), before) and [p.data_ptr() for p in model.parameters()] == places
    assert not masks.of(model) and model.training and all(p.requires_grad for p in model.parameters())
    assert reconstruction_report(model) is None


def test_a_model_that_is_no_chain_is_solved_whole() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.one(x).relu(), {"sum": self.other(self.one(x)), "count": torch.tensor(len(x))}

    x = torch.randn(1600, 32, generator=torch.Generator().manual_seed(3))
    report = reconstruction_report(twofour.prune(Two(), "2:4", data=list(x.split(16)), samples=1600, progress=False))
    assert report is not None and report.kept


def test_scores_by_the_name_of_logits_are_compared_as_such() -> None:
    class Answer(dict):
        __getattr__ = dict.__getitem__

    scores, others = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = others.float().softmax(-1), scores.float().softmax(-1)
    found = reconstruction._apart(Answer(logits=scores), Answer(logits=others))
    torch.testing.assert_close(found, (p * (p.log() - q.log())).sum(-1).mean())
    scores.requires_grad_()
    relative = reconstruction._apart((scores, 3), (others, 3))
    torch.testing.assert_close(relative, ((scores - others).square().sum() / others.square().sum()).float())


def test_bfloat16_and_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        data = [torch.randint(50, (8, 6), generator=torch.Generator().manual_seed(n)) for n in range(10)]
    model = twofour.prune(Stack().bfloat16(), "2:4", data=data, progress=False)
    assert reconstruction_report(model) is not None
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())


def test_blocks_that_share_a_weight() -> None:
    model = Stack()
    for block in list(model.blocks)[1:]:
        block.up = model.blocks[0].up  # pyright: ignore
    pruned = twofour.prune(model, "2:4", data=tokens(), progress=False)
    assert pruned.blocks[2].up.weight is pruned.blocks[0].up.weight  # pyright: ignore
    assert reconstruction_report(pruned) is not None and twofour.check(pruned, expect="2:4").ok


def test_it_follows_a_permutation() -> None:
    model = twofour.prune(Stack(), "2:4", data=tokens(), permute=True, progress=False)
    assert reconstruction_report(model).kept  # pyright: ignore[reportOptionalMemberAccess]
    assert twofour.check(model, expect="2:4").ok


def test_who_names_a_criterion_asks_for_it() -> None:
    plain = twofour.prune(Stack(), "2:4", criterion="wanda", data=tokens(), progress=False)
    assert reconstruction_report(plain) is None
    asked = twofour.prune(Stack(), "2:4", criterion="wanda", data=tokens(), progress=False, reconstruct=True)
    report = reconstruction_report(asked)
    assert report is not None and report.kept
    with pytest.raises(RecipeError, match=r"nothing to reconstruct by\n  got +reconstruct=True without data"):
        twofour.prune(Stack(), "2:4", reconstruct=True)

"""Reconstruction: nearer answers on data held back or the criterion's values to the bit, and masks hold either way."""

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.turns import in_turn
from twofour import masks
from twofour.errors import DataError, RecipeError
from twofour.pruning import reconstruction_report
from twofour.reconstruction import solving
from twofour.reconstruction.distances import answers_apart
from twofour.reconstruction.pace import Pace
from twofour.reconstruction.solving import Looks


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
    monkeypatch.setattr(solving, "BLOCK_STEPS", 30)
    monkeypatch.setattr(solving, "MODEL_STEPS", 60)


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
    for name in ("table.weight", "head.weight", "head.bias"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    changed = ("blocks.0.norm.weight", "blocks.0.up.bias")
    assert not any(torch.equal(model.get_parameter(name), before.get_parameter(name)) for name in changed)
    assert all(p.grad is None and p.requires_grad for p in model.parameters()) and model.training


def test_where_it_is_no_better_the_values_of_the_criterion_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "BLOCK_RATE", 30.0)
    monkeypatch.setattr(solving, "MODEL_RATE", 30.0)
    model = twofour.prune(Stack(), "2:4", data=tokens(), progress=False)
    report = reconstruction_report(model)
    assert report is not None and not report.kept and report.after == report.before and "no smaller" in str(report)
    assert same(held(model), held(twofour.prune(Stack(), "2:4", data=tokens(), reconstruct=False)))


def test_looks_at_samples_held_back_end_the_steps() -> None:
    looks = Looks(1.0, 600)
    assert [step for step in range(1, 601) if looks.due(step)] == [*range(25, 481, 25), 600]
    assert [looks.rate(step) for step in (0, 19, 480, 599)] == [1 / 20, 1.0, 1.0, 1 / 120]
    assert (
        looks.nearer(25, lambda: 0.8)
        and looks.nearer(50, lambda: 0.75)
        and looks.nearer(75, lambda: 0.749)
        and looks.steps == 600
    )
    assert not looks.nearer(100, lambda: 0.76) and (looks.cooling, looks.steps, looks.least) == (100, 150, 0.749)
    assert looks.rate(99) == looks.rate(100) == 1.0 and looks.rate(125) == 0.5 and looks.rate(149) == 1 / 50
    assert not looks.due(125) and looks.due(150)
    assert looks.nearer(150, lambda: 0.7) and looks.steps == 150
    for apart in (1.0, 1.2, float("nan")):
        looks = Looks(1.0, 600)
        assert not looks.nearer(25, lambda apart=apart: apart) and looks.steps == 25, "the first look found nothing won"


def test_what_wins_nothing_soon_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK_RATE", 30.0), ("MODEL_RATE", 30.0), ("LOOKED", 5)):
        monkeypatch.setattr(solving, name, value)
    steps, step = list[str](), solving.Run._step
    monkeypatch.setattr(
        solving.Run, "_step", lambda run, part, *more: (steps.append(part.where), step(run, part, *more))[1]
    )
    model = twofour.prune(Stack(), "2:4", data=tokens(), progress=False)
    assert {where: steps.count(where) for where in steps} == {
        **{f"block {number} of 3": 30 for number in (1, 2, 3)},
        "whole model": 5,
    }
    assert same(held(model), held(twofour.prune(Stack(), "2:4", data=tokens(), reconstruct=False)))


def test_dense_answers_that_have_no_room_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Stack()
    one = held(twofour.prune(kept, "2:4", data=tokens(), progress=False))
    monkeypatch.setattr(solving, "MOST_BYTES", 0)
    anew = Stack()
    assert same(one, held(twofour.prune(anew, "2:4", data=tokens(), progress=False)))
    assert anew.calls > kept.calls + 30


def calls_before_reconstruction() -> int:
    counted = Stack()
    twofour.prune(counted, "2:4", data=tokens(), progress=False, reconstruct=False)
    return counted.calls


def failing(at: int, error: type[BaseException], inside: bool) -> Stack:
    """Return a model that raises at a forward pass of its own, or of its second block."""

    def fail(number: int) -> None:
        if number == at:
            raise error("now")

    model = Stack(fail=None if inside else fail)
    if inside:
        seen = iter(range(1, 10_000))
        model.blocks[1].register_forward_pre_hook(lambda *_: fail(next(seen)))
    return model


PLACES = [(8, False), (40, False), (75, False), (100, False), (30, True), (80, True), (130, True)]
"""Forward passes after those of the criterion: of the survey, of blocks, of the whole model, of its judge."""


@in_turn(("into", "inside"), PLACES)
def test_an_interruption_leaves_the_model_as_it_was(into: int, inside: bool) -> None:
    model = failing(calls_before_reconstruction() + into, KeyboardInterrupt, inside)
    before, places = held(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        twofour.prune(model, "2:4", data=tokens(), progress=False)
    assert same(held(model), before) and [p.data_ptr() for p in model.parameters()] == places
    assert not masks.of(model) and model.training and all(p.requires_grad for p in model.parameters())
    assert reconstruction_report(model) is None


@pytest.mark.parametrize(("into", "inside"), PLACES)
def test_an_error_is_raised_where_it_was_asked_for_and_else_costs_nothing(
    into: int, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    at = calls_before_reconstruction() + into
    asked = failing(at, ValueError, inside)
    before = held(asked)
    with pytest.raises(DataError, match="while it is reconstructed"):
        twofour.prune(asked, "2:4", data=tokens(), progress=False, reconstruct=True)
    assert same(held(asked), before) and not masks.of(asked)
    model = twofour.prune(failing(at, ValueError, inside), "2:4", data=tokens(), progress=False)
    assert "not reconstructed, the values of the criterion stand" in caplog.text
    plain = twofour.prune(Stack(), "2:4", data=tokens(), progress=False, reconstruct=False)
    assert same(held(model), held(plain)) and reconstruction_report(model) is None


class Harmful(Stack):
    """Cannot be differentiated: what `exp` saved for it is changed."""

    def forward(self, tokens: Tensor) -> Tensor:
        y = super().forward(tokens).exp()
        y += 1
        return y


class Loss(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).square().mean()


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (Harmful, tokens(), "inplace operation"),
        (Loss, tokens(), "no tensor of real numbers with an axis"),
        (Stack, tokens(1)[0][:4], "1 batches, of 4 samples the smallest"),
    ],
    ids=["no gradient", "loss", "too few samples"],
)
def test_what_cannot_be_reconstructed_is_pruned_by_the_criterion(
    model: type[Stack], data: list[Tensor], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "twofour.reconstruction")
    found = twofour.prune(model(), "2:4", data=data, progress=False)
    assert "not reconstructed" in caplog.text and said in caplog.text
    assert same(held(found), held(twofour.prune(model(), "2:4", data=data, progress=False, reconstruct=False)))
    with pytest.raises(DataError, match=said):
        twofour.prune(model(), "2:4", data=data, progress=False, reconstruct=True)


def test_padding_counts_nowhere() -> None:
    class Masked(Stack):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(input_ids)

    mask = (torch.arange(6) < 3).long().expand(8, 6)
    given = [{"input_ids": ids, "attention_mask": mask} for ids in tokens()]
    others = [{"input_ids": ids.where(mask.bool(), 7), "attention_mask": mask} for ids in tokens()]
    one, other = (twofour.prune(Masked(), "2:4", data=data, progress=False) for data in (given, others))
    assert reconstruction_report(one).kept  # pyright: ignore[reportOptionalMemberAccess]
    assert reconstruction_report(one).after == pytest.approx(reconstruction_report(other).after)  # pyright: ignore


def test_frozen_parameters_stay() -> None:
    model = Stack()
    for block in model.blocks:
        block.norm.requires_grad_(False)  # pyright: ignore
    before = held(model)
    twofour.prune(model, "2:4", data=tokens(), progress=False)
    assert reconstruction_report(model).kept  # pyright: ignore[reportOptionalMemberAccess]
    assert all(torch.equal(before[name], value) for name, value in held(model).items() if "norm" in name)


def test_steps_that_take_too_long_are_not_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "twofour.reconstruction")
    monkeypatch.setattr(solving, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(solving, "MODEL_BYTES", 0)
    model = twofour.prune(Stack(), "2:4", data=tokens(), progress=False)
    report = reconstruction_report(model)
    assert report is not None and [part[:27] for part in report.short] == [
        f"block {number} of 3: 0 of 30 steps" for number in (1, 2, 3)
    ]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "for want of time 3 parts of the model" in warning and "reconstruct=False leaves it out" in warning
    assert "blocks alone" in caplog.text
    assert same(held(model), held(twofour.prune(Stack(), "2:4", data=tokens(), progress=False, reconstruct=False)))


def test_a_cold_first_step_and_a_busy_machine_take_no_steps_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "MODEL_SECONDS", 3.0)
    cold = [True]

    def load(_: int) -> None:  # as a step that compiles what it runs, and is alone in that
        if torch.is_grad_enabled() and cold:
            cold.clear()
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass

    def wait(_: int) -> None:  # as a step whose core another process has
        if torch.is_grad_enabled():
            time.sleep(0.06)

    quiet, loading, waiting = (
        twofour.prune(Stack(fail=fail), "2:4", data=tokens(), progress=False) for fail in (None, load, wait)
    )
    assert not cold and [reconstruction_report(model).short for model in (quiet, loading, waiting)] == [()] * 3  # pyright: ignore
    assert same(held(quiet), held(loading)) and same(held(quiet), held(waiting))


def test_a_pace_is_told_by_the_quickest_step_for_its_size_and_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("twofour.reconstruction.pace.time.thread_time", lambda: now[0])
    pace = Pace(torch.device("cpu"), [10, 30], 8.0)
    fits = list[int]()
    for index, took in [(0, 9.0), (0, 0.5), (1, 0.9), (1, 0.6), (1, 0.6), (0, 0.1)]:
        with pace.step(index):
            now[0] += took
        if pace.due():
            fits.append(pace.fit())
    # after two steps since the time was up by then, after three, and after six
    assert fits == [8, 13, 40]


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
    found = answers_apart(Answer(logits=scores), Answer(logits=others))
    torch.testing.assert_close(found, (p * (p.log() - q.log())).sum(-1).mean())
    scores.requires_grad_()
    found = answers_apart((scores, 3), (others, 3))
    torch.testing.assert_close(found, ((scores - others).square().sum() / others.square().sum()).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_tensors_of_inference_mode(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        data = [torch.randint(50, (8, 6), generator=torch.Generator().manual_seed(n)) for n in range(10)]
    model = twofour.prune(Stack().to(dtype), "2:4", data=data, progress=False)
    report = reconstruction_report(model)
    assert report is not None and report.kept
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters())


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
    with pytest.raises(RecipeError, match="`reconstruct` is neither True nor False"):
        twofour.prune(Stack(), "2:4", data=tokens(), reconstruct="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RecipeError, match=r"nothing to reconstruct by\n  got +reconstruct=True without data"):
        twofour.prune(Stack(), "2:4", reconstruct=True)

"""What judges the states of `finetune`: `evaluate`, batches of the training, data held back, and the loss."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.training.default import QUICK, quick, trained
from tests.training.small import Noisy, noisy_loader, pair_of_models, recipe
from tests.turns import in_turn
from twofour import masks
from twofour.errors import TrainingError
from twofour.training import defaults, finetune, judge, train
from twofour.training.batches import epoch_batches


@pytest.mark.parametrize("keep, wanted", [("highest", 2), ("lowest", 1), ("last", None)])
def test_the_best_state_is_that_which_evaluate_answers_best(keep, wanted):
    model, _ = pair_of_models()
    answers, states = iter([0.5, 0.1, 0.9, 0.4]), []

    def evaluate(m):
        states.append(copy.deepcopy(m.state_dict()))
        return {"first": next(answers), "second": 0.0}

    result = finetune(model, noisy_loader(), **recipe(epochs=3), evaluate=evaluate, keep=keep)
    assert result.sparse.kept == wanted
    kept = states[-1 if wanted is None else wanted]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("bad", [0, 1])
def test_held_data_without_a_finite_loss_are_refused_before_anything(bad):
    data = Noisy()
    held = [(data.x[:8], data.y[:8]), (data.x[8:16], data.y[8:16])]
    held[bad] = (torch.full_like(held[bad][0], float("nan")), held[bad][1])
    model, (pruned, _) = trained(), pair_of_models()
    with pytest.raises(
        TrainingError, match=rf"not finite before the first step[\s\S]*nan in batch {bad + 1} of `held`"
    ):
        quick(model, held=held)
    assert not masks.of(model)
    with pytest.raises(TrainingError, match=r"of `held`[\s\S]*bad values"):
        finetune(pruned, noisy_loader(), **recipe(), held=held, keep="loss")


def test_the_first_batches_of_the_training_judge():
    x = torch.arange(8000.0).view(-1, 1)
    for rows, batch, judging in ((400, 16, 128), (4000, 16, 208), (8000, 400, 400), (8000, 2000, 2000), (100, 16, 100)):
        loader = DataLoader(TensorDataset(x[:rows], x[:rows]), batch, shuffle=True)
        held = judge.trained_on(loader, 3)
        found = torch.cat([inputs for inputs, _ in held.batches])
        assert held.samples == len(found) == judging and not held.apart
        first = torch.cat([inputs for inputs, _ in epoch_batches(loader, 3, 0)])[:judging]
        assert torch.equal(found, first), "those that the training begins with"
        again = judge.trained_on(loader, 3)
        assert held.fingerprint == again.fingerprint != judge.trained_on(loader, 4).fingerprint

    class Unmeasured:
        def __iter__(self):
            return iter([(part, part) for part in x.split(100)])

    assert judge.trained_on(Unmeasured(), 0).samples == 1100  # more than 1024 are not wanted
    with pytest.raises(TrainingError, match="loader is empty"):
        judge.trained_on(type("Nothing", (), {"__iter__": lambda self: iter(())})(), 0)


def test_all_data_are_trained_on_and_a_schedule_reaches_its_end():
    seen = []

    def loss(output, target):
        seen.append(len(target) if torch.is_grad_enabled() else 0)
        return F.cross_entropy(output, target)

    batches = list(DataLoader(Noisy(), 4))
    rates = lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 2 * len(batches) - 1)  # noqa: E731
    result = quick(trained(), batches, loss=loss, schedule=rates)
    assert sum(seen) == 2 * len(Noisy()) and result.sparse.history[-1].lr == pytest.approx(0.05 * 0.1)
    assert "few to tell states apart: held= takes more" in "".join(result.notes)


def test_a_start_that_knows_the_data_by_heart_does_not_win_by_them():
    """Labels are chance, so that what the dense model knows of a sample is memory: no training finds it again."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 16, generator=generator), torch.randint(4, (96,), generator=generator)
    wide = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    adam = {"loss": F.cross_entropy, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2), "progress": False}
    alone = {"control": None, "prune": QUICK}
    train(wide, list(zip(x.split(8), y.split(8), strict=True)), **adam, epochs=30)
    assert float((wide(x).argmax(1) == y).float().mean()) > 0.95
    half = list(zip(x[:48].split(8), y[:48].split(8), strict=True))
    judged = {"": None, "the other half": [(x[48:], y[48:])]}
    results = [finetune(copy.deepcopy(wide), half, **adam, **alone, epochs=8, held=h) for h in judged.values()]
    assert [result.sparse.kept > 0 for result in results] == [True, False]
    assert results[0].sparse.history[-1].held < results[0].sparse.held


def test_data_that_are_held_by_the_caller_judge_the_same_whatever_was_drawn_before(tmp_path):
    held, results = noisy_loader(own_generator=True), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state, own = torch.get_rng_state(), held.generator.get_state()
        results.append(quick(trained(), held=held))
        assert torch.equal(torch.get_rng_state(), state) and torch.equal(held.generator.get_state(), own)
    assert results[0].sparse.held == results[1].sparse.held
    assert judge.given(held, 0).nbytes == Noisy().x.nbytes + Noisy().y.nbytes
    big = [(torch.zeros(2**14, 16), torch.zeros(2**14, dtype=torch.long))]
    assert "the data that judge 1.1" in "".join(quick(trained(), held=big, epochs=1).notes)
    quick(trained(), held=held, checkpoint=tmp_path, epochs=2)
    for other in (DataLoader(Noisy(seed=4), 8), DataLoader(Noisy(rows=40), 8)):
        with pytest.raises(TrainingError, match=r"of another run[\s\S]*held: "):
            quick(trained(), held=other, checkpoint=tmp_path, epochs=2)


@in_turn(
    "output, target, name",
    [
        (torch.randn(8, 4), torch.zeros(8, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 4, 5), torch.zeros(8, 5, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 5, 4), torch.zeros(8, 5, dtype=torch.long), "cross entropy"),
        (torch.randn(8, 2), torch.randn(8, 2), "squared error"),
        (SimpleNamespace(loss=torch.tensor(2.0)), None, "own"),
        (torch.randn(8), torch.ones(8), None),
        (torch.randn(8, 1), torch.zeros(8, dtype=torch.long), None),
        ("words", None, None),
    ],
)
def test_the_first_batch_tells_the_loss(output, target, name):
    class Answering(nn.Module):
        def forward(self, x):
            return output

    loader = [(torch.zeros(8, 3), target)]
    if name is None:
        with pytest.raises(TrainingError, match=r"which loss is meant[\s\S]*pass loss="):
            defaults.loss_for(Answering(), loader, 0)
        return
    loss, said = defaults.loss_for(Answering(), loader, 0)
    assert name in said
    if name == "own":
        assert loss(output, target) == 2
    elif name == "squared error":
        torch.testing.assert_close(loss(output, target), (output - target).square().mean())
    else:
        classes = output.movedim(1, -1) if output.shape == (8, 4, 5) else output
        wanted = F.cross_entropy(classes.reshape(-1, 4), target.flatten())
        torch.testing.assert_close(loss(output, target), wanted)

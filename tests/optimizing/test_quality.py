"""How answers are compared with the dense model's, and what the user's function may answer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from twofour.calibration import Batch
from twofour.errors import OptimizeError
from twofour.optimizing.closer import BINS, Closer, calibration_error, measures
from twofour.optimizing.pairs import Pairs, spearman
from twofour.optimizing.quality import AGREEMENT, COSINE, ERROR, SPEARMAN, Judge, said_of

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Answers(nn.Module):
    """Answers with a field of transformers' outputs, some rows of it turned round."""

    def __init__(self, field: str, wrong: int = 0) -> None:
        super().__init__()
        self.field, self.wrong = field, wrong

    def forward(self, x: Tensor) -> SimpleNamespace | Tensor:
        y = x * torch.where(torch.arange(len(x)) < self.wrong, -1.0, 1.0).view(-1, *[1] * (x.ndim - 1))
        return y if self.field == "" else Output({self.field: y})


class Output(dict):
    """As transformers' outputs: keys are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        if name in self:
            return self[name]
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("field", "x", "target", "kind"),
    [
        ("logits", X, None, AGREEMENT),
        ("", X, torch.zeros(32, dtype=torch.long), AGREEMENT),
        ("last_hidden_state", X[:, None].expand(-1, 3, -1), None, COSINE),
        ("", X, None, ERROR),
        ("", X, torch.zeros(32), ERROR),
    ],
)
def test_the_outputs_say_what_is_compared(field: str, x: Tensor, target: Tensor | None, kind: str) -> None:
    judge = Judge.by_agreement(Answers(field), [Batch(x, target)], "mean")
    same, half = judge.score("same", Answers(field)), judge.score("half", Answers(field, 16))
    assert (
        judge.kind == kind and same.value == pytest.approx(100.0, abs=1e-4) and same.error == pytest.approx(0, abs=1e-4)
    )
    worst = {AGREEMENT: 50.0, COSINE: 0.0, ERROR: 50.0}[kind]
    assert half.value == pytest.approx(worst, abs=1e-3) and half.error is not None and half.error > 5


def test_padding_is_no_part_of_an_embedding() -> None:
    class Encoder(nn.Module):
        def __init__(self, off: float) -> None:
            super().__init__()
            self.off = off

        def forward(self, x: Tensor, attention_mask: Tensor) -> Output:
            return Output(last_hidden_state=x + self.off * (1 - attention_mask[..., None]))

    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = Batch({"x": torch.randn(2, 3, 4), "attention_mask": mask})
    for pooling in ("mean", "cls"):
        judge = Judge.by_agreement(Encoder(0.0), [batch], pooling)
        assert judge.score("other", Encoder(50.0)).value == pytest.approx(100.0, abs=1e-3)


def test_nan_counts_as_wrong() -> None:
    class Nan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float("nan")

    assert Judge.by_agreement(Answers(""), [Batch(X)], "mean").score("nan", Nan()).value == 0.0
    with pytest.raises(OptimizeError, match="NaN or infinity"):
        Judge.by_agreement(Nan(), [Batch(X)], "mean")


def test_a_function_judges_in_points() -> None:
    judge, dense = Judge.by_function(MODEL, lambda model: 0.91)
    assert dense.value == pytest.approx(91.0) and judge.score("same", MODEL).value == pytest.approx(91.0)
    judge, dense = Judge.by_function(MODEL, lambda model: torch.tensor(82.5))
    assert dense.value == 82.5 and judge.score("same", MODEL).error is None


@pytest.mark.parametrize("answer", ["good", None, float("nan"), {"accuracy": 1.0}])
def test_a_function_that_answers_with_no_number_is_refused(answer: object) -> None:
    with pytest.raises(OptimizeError, match="judges the model"):
        Judge.by_function(MODEL, lambda model: answer)


MODEL = nn.Linear(4, 2)


def test_ranks_of_equal_values_are_shared() -> None:
    assert spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 8.0, 27.0, 64.0])) == pytest.approx(1.0)
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 4.0, 3.0])) == pytest.approx(-1.0)
    found = spearman(torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
    assert found == pytest.approx(0.9486833)  # scipy.stats.spearmanr
    with pytest.raises(OptimizeError, match="no order to compare"):
        spearman(torch.ones(4), torch.arange(4.0))


def test_pairs_judge_an_embedder_by_the_order_of_its_cosines() -> None:
    class Embedder(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
            return Output({"last_hidden_state": torch.stack([input_ids.float(), torch.ones(input_ids.shape)], -1)})

    first = [{"input_ids": torch.zeros(3, 2, dtype=torch.long), "attention_mask": torch.tensor([[1, 0]] * 3)}]
    ids = torch.tensor([[3, 99], [1, 99], [2, 99]])  # the second token is padding
    second = [{"input_ids": ids, "attention_mask": torch.tensor([[1, 0]] * 3)}]
    pairs = Pairs(first, second, torch.tensor([1.0, 3.0, 2.0]))
    judge, dense = Judge.by_function(Embedder(), pairs)
    assert (judge.kind, dense.value) == (SPEARMAN, pytest.approx(100.0)) and "3 labelled pairs" in said_of(pairs)
    assert judge.score("same", Embedder()).value == pytest.approx(100.0)
    with pytest.raises(OptimizeError, match="cannot be judged by pairs"):
        Pairs([X], [X], torch.arange(32.0))(nn.Identity())


class Rows(nn.Module):
    """Answers a sample's number with its row of logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_buffer("logits")[x[:, 0].long()]


def test_what_the_mean_hides_is_counted_by_hand() -> None:
    """40 samples of four classes, ten each; the dense model errs on two of class 3, the other on four of class 1."""
    classes = torch.arange(40) // 10
    answers = classes.clone()
    answers[[38, 39]] = 0
    changed = answers.clone()
    changed[10:14], changed[39] = 2, 3
    dense, other = (Rows(10.0 * nn.functional.one_hot(each, 4)) for each in (answers, changed))
    x = torch.arange(40.0)[:, None]
    held = [Batch(x[:25], classes[:25]), Batch(x[25:], classes[25:])]
    closer = Closer.of(dense, held, "mean")
    assert closer is not None
    before, now = closer.look(dense), closer.look(other)
    assert (before["changed"], before["lost"], before["won"], before["samples"]) == (0, 0, 0, 40)
    assert (now["changed"], now["lost"], now["won"]) == (5, 4, 1)
    assert now["worst"] == {"class": 1, "samples": 10, "now": 0.6, "before": 1.0}
    sure = float(torch.softmax(torch.tensor([10.0, 0, 0, 0]), 0)[0])
    assert before["ece"] == pytest.approx(sure - 38 / 40) and now["ece"] == pytest.approx(sure - 35 / 40)
    shown = measures({"dense": before, "2:4": now}, "dense")
    assert [measure["title"] for measure in shown] == [
        *("Answers that changed", "Calibration error", "The class that lost most")
    ]
    assert [score["value"] for score in shown[0]["scores"]] == [0, 12.5]
    assert shown[0]["scores"][1]["note"] == "5 of 40: 4 were right and are wrong, 1 the other way"
    assert shown[2]["scores"][1]["note"] == "class 1, 10 samples: dense 100.0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_that_are_probabilities_are_confidence_as_they_are(dtype: torch.dtype) -> None:
    """A second softmax would make a sure model an unsure one; the calibration error of a model's logits is the same."""
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 5
    classes = torch.where(torch.arange(200) % 4 == 0, 0, logits.argmax(-1))
    held = [Batch(torch.arange(200.0)[half, None], classes[half]) for half in (slice(None, 90), slice(90, None))]
    likely = logits.softmax(-1)
    found = []
    for answers in (logits, likely.to(dtype), likely.log(), 0.5 * likely):
        closer = Closer.of(Rows(answers), held, "mean")
        assert closer is not None
        found.append(closer.look(Rows(answers))["ece"])
    right = logits.argmax(-1) == classes
    true = calibration_error(likely.amax(-1), right)
    assert found[:3] == pytest.approx([true] * 3, abs=2e-3), "logits, probabilities, their logarithms"
    flat = calibration_error((0.5 * likely).softmax(-1).amax(-1), right)
    assert found[3] == pytest.approx(flat), "rows that sum to a half are no probabilities"
    signed = torch.cat([likely, torch.tensor([[0.5, -0.5]]).repeat(200, 1)], 1)
    closer = Closer.of(Rows(signed), held, "mean")
    assert closer is not None
    assert closer.look(Rows(signed))["ece"] == pytest.approx(
        calibration_error(signed.softmax(-1).amax(-1), signed.argmax(-1) == classes)
    ), "nor are rows with negative numbers that sum to 1"


def test_without_classes_answers_are_held_against_the_dense_ones() -> None:
    answers = torch.arange(40) // 20
    changed = torch.where(torch.arange(40) < 5, 1, answers)
    dense, other = (
        Rows(torch.stack([1.0 - each, 0.0 + each, torch.full_like(each, -9).float()], 1)) for each in (answers, changed)
    )
    held = [Batch(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.long))]
    closer = Closer.of(dense, held, "mean")
    assert closer is not None
    bare = Closer(replace(closer.judge, held=(Batch(held[0].inputs),)))
    looked = bare.look(other)
    assert looked["changed"] == 5 and "ece" not in looked and "lost" not in looked
    assert looked["worst"] == {"class": 0, "samples": 20, "now": 0.75, "before": 1.0}


def test_of_other_outputs_the_worst_samples_are_shown() -> None:
    rows = torch.ones(20, 3)
    bent = rows.clone()
    bent[7] = 0.5
    held = [Batch(torch.arange(20.0)[:, None])]
    closer = Closer.of(Rows(rows), held, "mean")
    assert closer is not None and closer.judge.kind == ERROR
    looked = closer.look(Rows(bent))
    assert looked["least"] == pytest.approx(50) and looked["low"] == pytest.approx(97.5)
    assert measures({"dense": closer.look(Rows(rows)), "2:4": looked}, "dense")[0]["scores"][1]["note"] == "least 50.00"
    assert Closer.of(Rows(rows * float("nan")), held, "mean") is None


def test_calibration_error_is_that_of_its_bins() -> None:
    confidence = torch.tensor([0.95, 0.99, 0.55, 0.51, 1.0])
    right = torch.tensor([True, False, True, False, True])
    apart = abs(0.95 + 0.99 + 1.0 - 2) + abs(0.55 - 1) + abs(0.51)
    by_bin = abs(0.95 + 0.99 + 1.0 - 2) + abs(0.55 + 0.51 - 1)
    same = (0.51 * BINS) // 1 == (0.55 * BINS) // 1
    assert calibration_error(confidence, right) == pytest.approx((by_bin if same else apart) / 5)
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([True, True])) == 0

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import twofour
from tests.turns import in_turn
from twofour.errors import TrainingError
from twofour.training import Hidden, Taught, distilled
from twofour.training.distillation import comparison


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, :3].argmax(1))), batch_size=16)


def test_the_loss_is_hintons():
    generator = torch.Generator().manual_seed(0)
    output, answer = torch.randn(2, 5, 7, 11, generator=generator, dtype=torch.float64)
    target = torch.randint(11, (5, 7), generator=generator)
    found = distilled(lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), weight=0.3, temperature=4.0)
    p, q = (answer / 4).softmax(-1), (output / 4).softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    want = 0.7 * F.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.3 * 16 * divergence
    torch.testing.assert_close(found(output, (target, answer)), want)
    values = distilled(lambda o, t: o.sum(), weight=1.0, kind="values")
    torch.testing.assert_close(values(output, (None, answer)), (output - answer).square().mean())


@pytest.mark.parametrize("kind", ["classes", "values", "relative"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_distance_of_answers_of_two_bytes_is_computed_in_float32(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    found, wanted = (300 * torch.randn(2, 512, 4, generator=generator)).to(dtype)
    loss = distilled(lambda output, target: output.float().sum() * 0, weight=1.0, kind=kind)
    torch.testing.assert_close(loss(found, (None, wanted)), loss(found.float(), (None, wanted.float())))


def test_finetune_takes_a_taught_loader_and_the_student_comes_nearer():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 16))
    student = twofour.prune(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), "2:4")
    taught = Taught(loader(), teacher)
    assert len(taught) == 4
    inputs, (target, answer) = next(iter(taught))
    assert teacher.training and target.shape == (16,)
    torch.testing.assert_close(answer, teacher.eval()(inputs).detach())  # as in evaluation: dropout is off
    teacher.train()

    def distance(model: nn.Module) -> float:
        return float(F.mse_loss(model(inputs), answer))

    result = twofour.finetune(
        student,
        taught,
        loss=distilled(F.cross_entropy, weight=0.9, kind="values"),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        epochs=4,
        evaluate=distance,
        progress=False,
    )
    assert result.sparse.evaluation < 0.7 * result.sparse.before  # type: ignore[operator]


def repeated(model: nn.Module, batches, loss=F.cross_entropy, **options) -> twofour.training.Result:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    return twofour.finetune(model, batches, loss=loss, optimizer=optimizer, epochs=2, progress=False, **options)


def pair(*shape: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    control = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, shape[0]), nn.Unflatten(-1, shape))
    return twofour.prune(copy.deepcopy(control), "2:4", criterion="magnitude", eligibility="any"), control


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def test_the_control_is_trained_first_and_teaches() -> None:
    sparse, control = pair(4)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
    result = repeated(sparse, batches, control=control, teacher="control")
    assert result.teacher == "the control" and "taught by the control" in str(result)

    other, trained = pair(4)
    repeated(other, batches, control=trained, teacher=None)
    assert torch.equal(weights(control), weights(trained)), "the control learns by the loss alone"
    assert not torch.equal(weights(sparse), weights(other))
    by_hand, _ = pair(4)
    repeated(by_hand, Taught(batches, trained), distilled(F.cross_entropy))
    assert torch.equal(weights(sparse), weights(by_hand))


def test_another_model_teaches_and_one_teacher_is_enough() -> None:
    (first, control), (second, _), (third, _) = pair(4), pair(4), pair(4)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(2)]
    found = repeated(first, batches, teacher=copy.deepcopy(control))
    assert found.teacher == "another model" and found.control is None
    repeated(second, Taught(batches, copy.deepcopy(control)), distilled(F.cross_entropy))
    assert torch.equal(weights(first), weights(second))
    assert repeated(third, Taught(batches, control), distilled(F.cross_entropy), teacher=control).teacher is None
    assert torch.equal(weights(first), weights(third)), "taught once, not twice"
    with pytest.raises(TrainingError, match=r"no such teacher\n  got +'dense'"):
        repeated(first, batches, teacher="dense")
    with pytest.raises(TrainingError, match="cannot teach itself"):
        repeated(first, batches, teacher=first)


@in_turn(
    ("answer", "target", "kind"),
    [
        (torch.randn(8, 4), torch.zeros(8, dtype=torch.long), "classes"),
        (torch.randn(8, 5, 4), torch.zeros(8, 5, dtype=torch.long), "classes"),
        (torch.randn(8, 4, 5), torch.zeros(8, 5, dtype=torch.long), "second"),
        (torch.randn(8, 4, 6, 6), torch.zeros(8, 6, 6, dtype=torch.long), "second"),
        (torch.randn(8, 4), torch.zeros(8, 4), "relative"),
        (torch.randn(8, 1), torch.zeros(8, dtype=torch.long), "relative"),
        (torch.randn(8), torch.zeros(8), "relative"),
        (torch.randn(8, 4), None, "relative"),
        ({"logits": torch.randn(8, 4)}, None, "classes"),
        ({"logits": torch.randn(8, 4)}, torch.zeros(8, 4), "relative"),
        ({"logits": torch.randn(8, 1)}, None, "relative"),
        (torch.tensor(1.0), None, None),
        ("words", None, None),
    ],
)
def test_targets_tell_how_answers_are_compared(answer, target, kind) -> None:
    found = comparison(answer, target)
    if kind is None or found is None:
        assert found is None and kind is None
        return
    scores = answer["logits"] if isinstance(answer, dict) else answer
    assert found[0] == ("classes" if kind == "second" else kind)
    assert torch.equal(found[1](answer), scores.movedim(1, -1) if kind == "second" else scores)


def test_values_are_compared_whatever_their_size() -> None:
    output, answer = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = distilled(lambda o, t: o.sum(), weight=1.0, kind="relative")
    found = loss(output, (None, answer))
    torch.testing.assert_close(found, (output - answer).square().sum() / answer.square().sum())
    torch.testing.assert_close(loss(1e-4 * output, (None, 1e-4 * answer)), found)


def test_a_model_that_answers_its_loss_trains_without_a_teacher(caplog) -> None:
    class OwnLoss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).square().mean()

    (sparse, control), (other, same) = pair(4), pair(4)
    batches = [(torch.randn(8, 16), 0) for _ in range(2)]
    result = repeated(OwnLoss(sparse), batches, lambda output, _: output, control=OwnLoss(control), teacher="control")
    assert caplog.text.count("nobody teaches the sparse model: the control answers with nothing") == 1
    assert result.teacher is None
    repeated(OwnLoss(other), batches, lambda output, _: output, control=OwnLoss(same), teacher=None)
    assert torch.equal(weights(sparse), weights(other))


def test_the_order_of_a_taught_loader_follows_from_the_seed() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    found = list[torch.Tensor]()
    for number in (5, 6):
        model, teacher = pair(4)
        own = torch.Generator().manual_seed(number)
        shuffled = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 8, shuffle=True, generator=own)
        repeated(model, Taught(shuffled, teacher), distilled(F.cross_entropy), seed=3)
        found.append(weights(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("wrong", [{"weight": 1.5}, {"temperature": 0.0}, {"kind": "words"}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(TrainingError, match="distillation is impossible"):
        distilled(F.cross_entropy, **wrong)


class Answer(dict):
    """As transformers' ModelOutput: a dict whose entries are attributes too."""

    def __getattr__(self, name: str):
        return self.get(name)


@dataclasses.dataclass
class Record:
    note: str
    scores: torch.Tensor


class Answering(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(16, 16), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: Answer(loss=y.sum(), logits=y),
        lambda y: {"last": y, "cache": y.sum()},
        lambda y: (y, y.sum()),
        lambda y: Record("", y),
    ],
    ids=["logits", "dict", "tuple", "dataclass"],
)
def test_teachers_and_students_that_answer_more_than_a_tensor(wrap) -> None:
    torch.manual_seed(0)
    teacher, student = Answering(wrap), Answering(wrap)
    inputs, (target, answer) = next(iter(Taught(loader(), teacher)))
    assert torch.equal(answer, teacher.layer(inputs))
    plain = distilled(F.cross_entropy)(student.layer(inputs), (target, answer))

    def own(output, truth):
        assert isinstance(output, type(wrap(torch.zeros(1, 2))))
        return F.cross_entropy(student.layer(inputs), truth)

    assert torch.equal(distilled(own)(student(inputs), (target, answer)), plain)


def test_a_function_says_what_is_compared() -> None:
    teacher = Answering(lambda y: {"deep": [y, 2 * y]})
    with pytest.raises(
        TrainingError, match=r"answer cannot be compared\n  got +dict without a tensor[\s\S]*answer=lam"
    ):
        next(iter(Taught(loader(), teacher)))
    inputs, (_, answer) = next(iter(Taught(loader(), teacher, answer=lambda output: output["deep"][1])))
    assert torch.equal(answer, 2 * teacher.layer(inputs))
    loss = distilled(lambda o, t: o["deep"][0].sum(), weight=1.0, kind="values", answer=lambda o: o["deep"][1])
    assert loss(teacher(inputs), (None, answer)).item() == 0.0


def test_answers_of_one_axis() -> None:
    output, answer = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    values = distilled(lambda o, t: o.sum(), weight=1.0, kind="values")
    torch.testing.assert_close(values(output, (None, answer)), (output - answer).square().mean())
    for shape in ((8,), (8, 1)):
        with pytest.raises(TrainingError, match=r"no scores of classes\n  got +shape \(8,[\s\S]*kind=\"values\""):
            distilled(F.cross_entropy)(output.view(shape), (None, answer.view(shape)))
    with pytest.raises(TrainingError, match=r"cannot be compared\n  got +\(8, 1\) and \(8,\)"):
        values(output.view(8, 1), (None, answer))  # would be compared as (8, 8)


def test_a_teacher_that_is_no_model_is_refused():
    with pytest.raises(TrainingError, match="there is no teacher"):
        Taught(loader(), "x")  # pyright: ignore[reportArgumentType]


def layered(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))


def test_layers_are_taught_too() -> None:
    torch.manual_seed(0)
    teacher, student = layered(), layered(8)
    inputs, (target, answer, states) = next(iter(Taught(loader(), teacher, layers=["1", "4"])))
    assert torch.equal(states[0], teacher[:2](inputs)) and torch.equal(states[1], answer) and len(states) == 2
    with Hidden(student, ["1", "4"], weight=0.3) as hidden:
        loss = distilled(F.cross_entropy, hidden=hidden)
        found = loss(student(inputs), (target, answer, states))
        with pytest.raises(TrainingError, match=r"0 of 2 layers that the student's forward ran, 2 taught"):
            loss(answer, (target, answer, states))  # one forward is compared once
        student(inputs)
        with pytest.raises(TrainingError, match=r"2 of 2 layers .*, 0 taught"):
            loss(answer, (target, answer))
    ours = student[:2](inputs), student(inputs)
    apart = [(a - b).square().sum() / b.square().sum() for a, b in zip(ours, states, strict=True)]
    plain = distilled(F.cross_entropy)(student(inputs), (target, answer))
    torch.testing.assert_close(found, plain + 0.3 * (apart[0] + apart[1]) / 2)
    with Hidden(student, ["2"]) as hidden:
        wide = next(iter(Taught(loader(), teacher, layers=["2"])))[1]
        with pytest.raises(TrainingError, match=r"cannot be compared\n  got +\(16, 8\) and \(16, 16\)") as caught:
            distilled(F.cross_entropy, hidden=hidden)(student(inputs), wide)
        assert caught.value.layer == "2"
    assert not any(module._forward_hooks for net in (teacher, student) for module in net.modules())


def test_a_student_comes_nearer_by_its_layers() -> None:
    torch.manual_seed(0)
    teacher, student = layered(), twofour.prune(layered(), "2:4")
    held = next(iter(loader()))[0]

    def distance(model: nn.Module) -> float:
        return float(F.mse_loss(model[:2](held), teacher[:2](held)) / teacher[:2](held).square().mean())  # type: ignore[index]

    with Hidden(student, ["1"]) as hidden:
        result = twofour.finetune(
            student,
            Taught(loader(), teacher, layers=["1"]),
            loss=distilled(F.cross_entropy, hidden=hidden),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            epochs=6,
            evaluate=distance,
            progress=False,
        )
    assert result.sparse.evaluation < 0.5 * result.sparse.before  # type: ignore[operator]


def test_impossible_layers_are_refused() -> None:
    for layers in (["9"], [], "1"):
        with pytest.raises(TrainingError, match="no such layers"):
            Hidden(layered(), layers)
    with pytest.raises(TrainingError, match="no such layers"):
        Taught(loader(), layered(), layers=["9"])
    with pytest.raises(TrainingError, match="`weight` is impossible"):
        Hidden(layered(), ["1"], weight=-1.0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 5)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embed(input_ids))


@pytest.mark.parametrize("kind", ["classes", "values", "relative"])
def test_hidden_tokens_are_not_compared(kind) -> None:
    torch.manual_seed(0)
    teacher, student = Words(), Words()
    ids, target = torch.randint(10, (2, 4)), torch.randint(5, (2, 4))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    _, (_, answer, states, tokens) = next(iter(Taught([(inputs, target)], teacher, layers=["embed"])))
    assert torch.equal(tokens, mask == 1) and len(states) == 1
    loss = distilled(lambda o, t: o.sum() * 0, weight=1.0, kind=kind)
    found = loss(student(**inputs), (target, answer, (), tokens))
    ours, wanted = (net(**inputs)[mask == 1] for net in (student, teacher))
    torch.testing.assert_close(found, loss(ours, (target[mask == 1], wanted)))
    with Hidden(student, ["embed"], weight=0.5) as hidden:
        both = distilled(lambda o, t: o.sum() * 0, weight=0.0, hidden=hidden)
        more = both(student(**inputs), (target, answer, states, tokens))
    ours, wanted = (net.embed(ids)[mask == 1] for net in (student, teacher))
    torch.testing.assert_close(more, 0.5 * (ours - wanted).square().sum() / wanted.square().sum())
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(mask)}
    assert len(next(iter(Taught([(whole, target)], teacher)))[1]) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_distance_of_many_scores_of_16_bits_is_a_number(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    found, wanted = (8 * torch.randn(20000, 5, generator=generator) for _ in range(2))
    loss = distilled(lambda o, t: o.float().sum() * 0, weight=1.0)
    exact = loss(found.to(dtype).float(), (None, wanted.to(dtype).float()))
    few = loss(found.to(dtype), (None, wanted.to(dtype)))
    assert float(exact) * len(found) / 4 > torch.finfo(torch.float16).max
    torch.testing.assert_close(few.float(), exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 2)])
def test_classes_that_are_ignored_are_not_compared(shape) -> None:
    generator = torch.Generator().manual_seed(0)
    found, wanted = (torch.randn(*shape, 5, generator=generator) for _ in range(2))
    target = torch.randint(5, shape, generator=generator)
    target.flatten()[::2] = -100
    loss = distilled(lambda o, t: o.sum() * 0, weight=1.0)
    kept = target != -100
    torch.testing.assert_close(loss(found, (target, wanted)), loss(found[kept], (target[kept], wanted[kept])))
    nothing = torch.full(shape, -100)
    assert loss(found, (nothing, wanted)).item() == 0.0

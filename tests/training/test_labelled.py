"""Batches as transformers' collators yield them: dicts of keyword arguments with `labels`."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.turns import in_turn
from twofour import masks, prune
from twofour.errors import TrainingError
from twofour.training import finetune
from twofour.training.batches import pair


class Classifier(nn.Module):
    """Answers as transformers' classifiers do: with logits, and with a loss where it is given `labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = self.head(self.body(inputs).relu())
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


def batches(name: str = "labels") -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(16, 16, generator=draw) for _ in range(4)]
    return [{"inputs": each, name: each[:, :4].argmax(1)} for each in rows]


def trained(loader, kind: type[nn.Module] = Classifier, **options) -> nn.Module:
    torch.manual_seed(0)
    model, optimizer = kind(), (lambda params: torch.optim.SGD(params, lr=0.1))
    prune = {"criterion": "magnitude", "eligibility": "any", "permute": False}
    options = {"epochs": 2, "optimizer": optimizer, "prune": prune, "progress": False, **options}
    finetune(model, loader, **options)
    return model


class Plain(Classifier):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.head(self.body(inputs).relu())


@in_turn("how", [{}, {"control": None}, {"loss": lambda output, target: F.cross_entropy(output.logits, target)}])
def test_a_dict_with_labels_trains_as_a_pair_does(how):
    one = trained(batches(), **how)
    other = trained([(each, each["labels"]) for each in batches()], **how)
    assert len(masks.of(one)) == 2
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_other_dicts_are_told_with_their_keys_and_the_pair_written_down():
    loader = batches("label")
    before = copy.deepcopy(loader)
    with pytest.raises(TrainingError, match=r"got +dict with inputs, label\n") as error:
        trained(loader)
    line = '({k: v for k, v in b.items() if k != "label"}, b["label"])'
    assert line in str(error.value)
    inputs, target = eval(line, {"b": before[0]})
    assert list(inputs) == ["inputs"] and torch.equal(target, before[0]["label"])
    with pytest.raises(TrainingError, match="dict with inputs, labels"):
        pair({"inputs": torch.zeros(2), "labels": None})
    with pytest.raises(TrainingError, match=r'!= "<target>"}, b\["<target>"\]\)'):
        pair({"x": torch.zeros(2), "labels": None})


@in_turn("how", [{"criterion": "magnitude"}, {"criterion": "admm"}, {"criterion": "taylor", "loss": F.cross_entropy}])
def test_a_model_that_takes_no_labels_trains_as_on_pairs(how):
    how = {"loss": F.cross_entropy, "prune": {"eligibility": "any", "permute": False, **how}}
    one = trained(batches(), Plain, **how)
    other = trained([(each["inputs"], each["labels"]) for each in batches()], Plain, **how)
    assert len(masks.of(one)) == 2
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_prune_calls_a_model_that_takes_no_labels_without_them():
    torch.manual_seed(0)
    one = Plain()
    other = copy.deepcopy(one)
    prune(one, data=batches(), eligibility="any", progress=False)
    prune(other, data=[{"inputs": each["inputs"]} for each in batches()], eligibility="any", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_argument_that_no_forward_takes_is_told_by_the_call():
    loader = [{**each, "other": each["labels"]} for each in batches()]
    with pytest.raises(TypeError, match="unexpected keyword"):
        trained(loader, Plain, loss=F.cross_entropy)

"""Batches as transformers' collators yield them: dicts of keyword arguments with `labels`."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.turns import in_turn
from twofour import masks
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


def trained(loader, **options) -> nn.Module:
    torch.manual_seed(0)
    model, optimizer = Classifier(), (lambda params: torch.optim.SGD(params, lr=0.1))
    prune = {"criterion": "magnitude", "eligibility": "any", "permute": False}
    options = {"epochs": 2, "optimizer": optimizer, "prune": prune, "progress": False, **options}
    finetune(model, loader, **options)
    return model


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

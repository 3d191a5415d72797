"""Inputs that a call leaves out: the graph serves it where the model makes the same itself, and there alone."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.turns import in_turn
from twofour.compiler.left_out import Default, completed
from twofour.compiler.whole_model import WholeModel

pytestmark = pytest.mark.usefixtures("no_measuring")

IDS = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 8:] = 0
ZEROS, PLACES = torch.zeros_like(IDS), torch.arange(12).expand(3, 12).contiguous()


class Words(nn.Module):
    """Makes what it is not given: kinds of words, their places and which of them count, each in some way."""

    def __init__(self, kind: int = 0, *, places_by_mask: bool = False, mask_by_words: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kinds, self.places = nn.Embedding(50, 64), nn.Embedding(2, 64), nn.Embedding(64, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.kind, self.places_by_mask, self.mask_by_words = kind, places_by_mask, mask_by_words

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, kinds: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        if mask is None:
            mask = (ids != 0).long() if self.mask_by_words else torch.ones_like(ids)
        kinds = torch.full_like(ids, self.kind) if kinds is None else kinds
        if places is None:
            counted = mask.cumsum(1) - 1
            places = counted.clamp(min=0) if self.places_by_mask else torch.arange(ids.shape[1]).expand_as(ids)
        x = self.words(ids) + self.kinds(kinds) + self.places(places)
        return self.down(torch.relu(self.up(x))) * mask[..., None]


def by_graph(fast: Any, monkeypatch: pytest.MonkeyPatch, **call: Tensor) -> tuple[bool, Any]:
    """Whether a call runs as the graph, and its answer."""
    ran: list[bool] = []
    program = fast.forward.program
    with monkeypatch.context() as patch:
        patch.setattr(fast.forward, "program", lambda *leaves: ran.append(True) or program(*leaves))
        patch.setattr(fast.forward, "ragged", None)
        found = fast(**call)
        return bool(ran), found


@in_turn(
    ("options", "left"),
    [
        ({}, {"mask": "ones", "kinds": "zeros", "places": "positions"}),
        ({"kind": 1}, {"mask": "ones", "kinds": "ones", "places": "positions"}),
        ({"places_by_mask": True}, {"mask": "ones", "kinds": "zeros"}),
        ({"mask_by_words": True}, {"kinds": "zeros", "places": "positions"}),
    ],
)
def test_what_may_be_left_out_is_what_the_model_makes_whatever_else_it_is_given(
    options: dict[str, Any], left: dict[str, str]
) -> None:
    monkeypatch = pytest.MonkeyPatch()
    model = twofour.prune(Words(**options).eval(), "2:4")
    example = {"ids": IDS, "mask": MASK, "kinds": ZEROS, "places": PLACES}
    fast: Any = quick(model, example, graph=True)
    assert isinstance(fast.forward, WholeModel)
    complete: Any = fast.forward.complete
    assert {name: one.kind for name, one in complete.keywords["defaults"].items()} == left
    told = ", ".join(f"`{name}` ({kind} then)" for name, kind in left.items())
    assert f"; calls may leave out {told}" in fast.plan.account.reason
    for ids in (IDS, IDS[:2, :7], IDS.repeat(2, 1), IDS[:2, :7].flip(1)):
        rows, tokens = ids.shape
        whole = {"ids": ids, "mask": torch.ones_like(ids), "kinds": torch.ones_like(ids)}
        whole["places"] = torch.arange(tokens).expand(rows, tokens).contiguous()
        for out in (*({name} for name in example if name != "ids"), {"mask", "kinds", "places"}):
            given = {name: value for name, value in whole.items() if name not in out}
            for _ in range(2):  # bound, then known by how its tensors lie
                ran, found = by_graph(fast, monkeypatch, **given)
                assert ran is (out <= left.keys()), (out, ids.shape)
                torch.testing.assert_close(found, model(**given).detach(), rtol=1e-4, atol=1e-4)


class Padded(Words):
    """Makes its mask by a padding of its own, and answers with it."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.padding = lambda: 7
        if said == "table":
            self.words = nn.Embedding(50, 64, padding_idx=7)
        elif said == "attribute":
            self.pad = 7
        elif said == "part":
            self.words.config = SimpleNamespace(words=SimpleNamespace(pad_token_id=7))  # type: ignore[assignment]

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        mask = (ids != self.padding()).long() if mask is None else mask
        return super().forward(ids, mask), mask


@in_turn("said", ["table", "attribute", "part", "", "elsewhere"])
def test_a_mask_that_a_model_makes_by_its_own_padding_may_not_be_left_out(said: str) -> None:
    """One of `config.pad_token_id`, or 0, was the only padding that was looked for."""
    model = twofour.prune(Padded(said).eval(), "2:4")
    ids = torch.where(IDS == 7, 8, IDS)
    if not said:
        ids[0, 3] = 7  # among the tokens of the example alone
    elif said == "elsewhere":
        ids[2, 3] = 7  # in a row that is not looked at by parts
    fast: Any = quick(model, {"ids": ids, "mask": torch.ones_like(ids)}, graph=True)
    assert isinstance(fast.forward, WholeModel)
    assert fast.forward.complete is None
    padded = IDS.clone()
    padded[1, 6:] = 7
    torch.testing.assert_close(fast(ids=padded), model(ids=padded), rtol=1e-4, atol=1e-4)


class Answers(Words):
    """Answers with the mask that it makes."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        mask = torch.ones_like(ids) if mask is None else mask
        return super().forward(ids, mask), mask


def test_what_a_caller_writes_to_an_answer_is_not_seen_by_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that was made for one call was kept for all, and handed out."""
    model = twofour.prune(Answers().eval(), "2:4")
    fast: Any = quick(model, {"ids": IDS, "mask": MASK}, graph=True)
    for _ in range(4):
        ran, found = by_graph(fast, monkeypatch, ids=IDS)
        assert ran
        torch.testing.assert_close(found, model(ids=IDS), rtol=1e-4, atol=1e-4)
        found[1].zero_()


def test_tokens_of_a_tokenizer_without_their_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call without `token_type_ids` of zeros ran layer by layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)).eval()
    masked: Any = twofour.prune(model, "2:4")
    fast: Any = quick(masked, {"input_ids": IDS, "token_type_ids": ZEROS, "attention_mask": MASK})
    twofour.save(fast, tmp_path / "m.safetensors")
    again = twofour.load(tmp_path / "m.safetensors", copy.deepcopy(model))
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), again):
        for mask in ({"attention_mask": MASK}, {}):
            ran, found = by_graph(one, monkeypatch, input_ids=IDS, **mask)
            want = masked(input_ids=IDS, **mask)
            assert ran
            seen = mask.get("attention_mask", torch.ones_like(MASK)).bool()
            got = found.last_hidden_state[seen]
            torch.testing.assert_close(got, want.last_hidden_state.detach()[seen], rtol=1e-4, atol=1e-4)


def test_a_call_that_runs_layer_by_layer_is_told_what_it_gives(caplog: pytest.LogCaptureFixture) -> None:
    """It was told to pass what the plan says may be left out; a call that the model refuses is told by the model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    model = twofour.prune(transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)).eval(), "2:4")
    fast: Any = quick(model, {"input_ids": IDS, "token_type_ids": ZEROS, "attention_mask": MASK})
    caplog.clear()
    for call in ({}, {"input_ids": torch.ones(1, 513, dtype=torch.long)}):
        with pytest.raises((ValueError, RuntimeError)):
            fast(**call)
    assert "layer by layer" not in caplog.text
    for call, said in (
        ({"attention_mask": MASK.float()}, "`attention_mask` (torch.float32 (3, 12), and the graph holds for"),
        ({"foo": 3}, "`foo` (3, and the graph was captured without it: forward names no such argument)"),
    ):
        caplog.clear()
        for _ in range(2):
            fast(input_ids=IDS, **call)
        (line,) = [text for text in caplog.messages if "layer by layer" in text]
        assert line.startswith(f"a call with {said}")


def test_sizes_that_do_not_fit_are_those_of_what_a_call_gives() -> None:
    fast: Any = quick(Words().eval(), {"ids": IDS, "mask": MASK, "kinds": ZEROS}, graph=True)
    fast.forward.guard.text = "L['ids'].size()[1] < 20"
    fast.forward.guard._test = None
    name, why = fast.forward._unlike({"ids": IDS.repeat(1, 2)})
    assert (name, why) == ("ids", "torch.int64 (3, 24): sizes outside of what the graph holds for")


def test_an_input_without_a_size_is_not_made() -> None:
    one = {"kinds": Default("zeros", "ids", (True, True), torch.int64)}
    for ids in (None, torch.zeros(3), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)):
        assert completed({"ids": ids}, one) is None
    assert completed({"ids": IDS, "kinds": ZEROS}, one) is None, "nothing is left out"
    made = completed({"ids": IDS}, {"kinds": Default("positions", "ids", (False, True), torch.int32)})
    assert made is not None and torch.equal(made["kinds"], torch.arange(12, dtype=torch.int32)[None])

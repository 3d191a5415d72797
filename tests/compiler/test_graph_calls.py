"""Which calls run as the graph that compile makes where an example is given."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour.capture import bind
from twofour.compiler import graph as compiled_graph
from twofour.compiler import whole_model
from twofour.compiler.whole_model import WholeModel
from twofour.errors import KernelError

from .small import Branching, mlp, quick

pytestmark = pytest.mark.usefixtures("no_measuring")


class Embeds(nn.Module):
    """Writes what it computes into the features it was given, as the modules of a SentenceTransformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, features: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        features["embedding"] = self.down(torch.relu(self.up(features["values"])))
        return features


IDS = torch.zeros(1, 1, dtype=torch.int64)


class Makes(Embeds):
    """One that makes its features itself: with what says that they are numbers, and with an offset of 0."""

    def preprocess(self, texts: list[str]) -> dict[str, object]:
        values = torch.randn(len(texts), 64, generator=torch.Generator().manual_seed(0))
        return {"values": values, "offset": torch.zeros(len(texts), 64), "kind": "numbers", "kinds": IDS}

    def forward(self, features: dict[str, Any], **options: object) -> dict[str, Any]:
        if features.get("kind", "numbers") != "numbers":
            features["values"] = -features["values"]
        features["values"] = features["values"] + features.get("offset", 0) + features.get("kinds", IDS)
        return super().forward(features, **options)


def test_a_graph_serves_entries_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = twofour.prune(Makes(), "2:4").eval()
    fast = quick(model, ({"values": torch.randn(4, 64)},), graph=True)
    x, shift = torch.randn(3, 64), torch.ones(3, 64)
    calls: list[tuple[dict[str, Any], bool]] = [
        ({"kind": "numbers", "values": x, "offset": torch.zeros(3, 64)}, True),
        ({"values": x, "kind": "numbers"}, True),
        ({"values": x, "kinds": IDS.int()}, True),
        ({"values": x, "kinds": IDS.short()}, False),
        ({"values": x, "kinds": IDS + 1}, False),
        ({"values": x, "kind": "other"}, False),
        ({"values": x, "offset": shift}, False),
        ({"values": x, "offset": torch.zeros(3, 64).long()}, False),
        ({"values": x, "more": "numbers"}, False),
    ]
    for given, by_graph in calls:
        want, found = model(dict(given)), fast(features := dict(given))
        assert found is features and found.keys() == want.keys()
        torch.testing.assert_close(found["embedding"].float(), want["embedding"].float(), rtol=1e-4, atol=1e-4)
        with monkeypatch.context() as patch:
            assert _served(fast, patch, features=dict(given)) is by_graph, given
    assert caplog.text.count("runs layer by layer") >= 2


def _served(fast: nn.Module, monkeypatch: pytest.MonkeyPatch, **call: object) -> bool:
    """Tell whether a call runs as the graph."""
    ran: list[bool] = []
    program = fast.forward.program
    monkeypatch.setattr(fast.forward, "program", lambda *leaves: ran.append(True) or program(*leaves))
    fast(**call)
    return bool(ran)


def test_an_example_is_enough_for_a_graph() -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), torch.randn(4, 64))
    assert isinstance(fast.forward, WholeModel) and fast.plan.account.engine == "graph"
    assert "forward" not in quick(twofour.prune(mlp(), "2:4")).__dict__
    assert "forward" not in quick(twofour.prune(mlp(), "2:4"), torch.randn(4, 64), graph=False).__dict__


def test_no_graph_is_no_warning_unless_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(Branching(), "2:4")
    for graph, warned in (("auto", False), (True, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "twofour.compiler"):
            fast = quick(model, torch.ones(4, 64), graph=graph)
        assert ("cannot be captured" in caplog.text) is warned
        assert "cannot be captured" in fast.plan.account.reason and fast.plan.account.engine == "layers"


def test_a_rewrite_that_fails_leaves_the_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NameError("name 'math' is not defined")

    monkeypatch.setattr(compiled_graph, "rewrite_graph", fail)
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        fast = quick(twofour.prune(mlp(), "2:4"), torch.ones(4, 64))
    assert "NameError: name 'math' is not defined, please report it" in fast.plan.account.reason
    assert "please report it" in caplog.text and "forward" not in fast.__dict__


def test_a_model_that_writes_into_its_features_runs_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = twofour.prune(Embeds(), "2:4").eval()
    fast = quick(model, ({"values": torch.randn(3, 64), "kind": "text"},))
    assert isinstance(fast.forward, WholeModel)
    features = {"kind": "text", "values": torch.randn(5, 64)}
    assert _served(fast, monkeypatch, features=features)
    answer = fast(features := {"values": torch.randn(5, 64), "kind": "text"})
    assert answer is features and list(features) == ["values", "kind", "embedding"]
    torch.testing.assert_close(answer["embedding"], model({"values": features["values"]})["embedding"].detach())


def test_a_model_that_changes_its_features_and_answers_otherwise_says_so() -> None:
    class Pops(Embeds):
        def forward(self, features: dict[str, Tensor], **options: object) -> Tensor:
            return super().forward(features)["embedding"]

    fast = quick(twofour.prune(Pops(), "2:4"), ({"values": torch.randn(3, 64)},))
    assert "the forward changes `features`, which it is given" in fast.plan.account.reason


def test_a_call_that_leaves_the_graph_names_the_argument(caplog: pytest.LogCaptureFixture) -> None:
    fast = quick(twofour.prune(Embeds(), "2:4"), ({"values": torch.randn(3, 64)},))
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        for _ in range(2):
            fast({"values": torch.randn(3, 64)}, normalize=True)
        fast({"values": torch.randn(3, 64).expand(2, 3, 64)})
    assert caplog.text.count("a call with `normalize` (True, and the graph was captured without it") == 1
    assert "a call with `features['values']` (torch.float32 (2, 3, 64), and the graph holds for" in caplog.text


def test_calls_that_lie_alike_are_bound_once_and_others_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return self.down(torch.relu(self.up(a))) * scale - b

    model = twofour.prune(Two().eval(), "2:4")
    fast = quick(model, (torch.randn(3, 64), torch.randn(3, 64)))
    a, b = torch.randn(2, 5, 64).unbind()
    with torch.no_grad():
        for args, kwargs in (((a, a), {}), ((a, b), {}), ((b, a), {}), ((), {"b": a, "a": b}), ((a,), {"b": b})):
            for _ in range(3):
                torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs), atol=1e-5, rtol=1e-4)
        bound: list[int] = []
        monkeypatch.setattr(whole_model, "bind", lambda *given: bound.append(1) or bind(*given))
        assert _served(fast, monkeypatch, a=a, b=b) and _served(fast, monkeypatch, a=b, b=a) and len(bound) <= 1
        bound.clear()
        torch.testing.assert_close(fast(a, b, 2.0), model(a, b, 2.0), atol=1e-5, rtol=1e-4)
        with pytest.raises(TypeError):
            fast(a, b, c=b)
        assert len(bound) == 2
        fast.train()
        assert not _served(fast, monkeypatch, a=a, b=b)
        fast.eval()
        fast.up.register_forward_hook(lambda *_: None)
        assert not _served(fast, monkeypatch, a=a, b=b)


def test_calls_outside_of_no_grad_are_bound_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 64)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.relu(self.up(a)) - b

    model = twofour.prune(Two().eval(), "2:4")
    a, b = torch.randn(2, 5, 64).unbind()
    fast = quick(model, (a, b))
    bound: list[int] = []
    monkeypatch.setattr(whole_model, "bind", lambda *given: bound.append(1) or bind(*given))
    assert torch.is_grad_enabled() and all(_served(fast, monkeypatch, a=a, b=b) for _ in range(3)) and len(bound) <= 1
    for given in ({"a": a.clone().requires_grad_(), "b": b}, {"a": a, "b": b.clone().requires_grad_()}):
        with pytest.raises(KernelError, match="inference"):
            fast(**given)
        with torch.no_grad():
            assert _served(fast, monkeypatch, **given)


def test_hooks_that_transformers_leaves_behind_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=100
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(0, 100, (1, 16))
    model(ids, output_hidden_states=True)
    fast = quick(twofour.prune(model, "2:4"), {"input_ids": ids})
    assert isinstance(fast.forward, WholeModel)
    assert len(fast(ids, output_hidden_states=True).hidden_states) == 2
    assert _served(fast, monkeypatch, input_ids=ids)


def test_an_int8_graph_survives_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph and layers round apart from each other: what the layers lose is allowed, also without the model."""
    model, example = twofour.prune(mlp(), "2:4"), torch.randn(32, 64)
    allowed: list[float] = []
    monkeypatch.setattr(
        compiled_graph, "_probe", lambda runner, *_: allowed.append(runner.agreement.floats) or runner.agreement.floats
    )
    twofour.save(quick(model, example, dtype="int8"), tmp_path / "int8.safetensors")
    loaded = twofour.load(tmp_path / "int8.safetensors", mlp(1), graph=True, example=example, tokens=(1, 32))
    assert loaded.plan.account.engine == "graph"
    assert allowed[0] == pytest.approx(allowed[1], rel=0.2) and min(allowed) > 0.05


def test_the_graph_has_the_signature_of_the_model() -> None:
    example = torch.randn(4, 64)
    fast = quick(twofour.prune(mlp(), "2:4"), example)
    program = torch.export.export(fast, (example,), dynamic_shapes={"input": {0: torch.export.Dim("batch")}})
    torch.testing.assert_close(program.module()(torch.randn(7, 64)).shape, torch.Size((7, 10)))


class Multiplied(nn.Module):
    """Two layers, and whole numbers that a constant of the call multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, ids: Tensor, by: object) -> tuple[Tensor, Tensor]:
        return self.down(input=torch.relu(self.up(x))), ids * by


@pytest.mark.parametrize("by", [2.0, True, torch.tensor([[2.0]]), torch.arange(6)])
def test_a_constant_of_another_type_is_another_call(by: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, ids = twofour.prune(Multiplied(), "2:4"), torch.randn(4, 64), torch.arange(6)
    fast = quick(model, (x, ids, 2), memory="small")
    assert _served(fast, monkeypatch, x=x, ids=ids, by=2)
    got, want = fast(x, ids, by), model(x, ids, by)
    assert got[1].dtype == want[1].dtype and torch.equal(got[1], want[1])
    assert not _served(fast, monkeypatch, x=x, ids=ids, by=by)


class Looks(nn.Module):
    """Looks ids up where a mask leaves them, with numbers of their own beside it; `adds` computes with the ids."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds, self.table = adds, nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is None:
            scale = torch.ones(ids.shape, device=ids.device)
        found = self.table(ids + 1 if self.adds else ids) * (mask[:, :, None] != 0) * scale[:, :, None]
        return self.down(torch.relu(self.up(found)))


def test_ids_of_int32_enter_a_graph_as_int64(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = torch.randint(0, 49, (3, 7)), torch.tensor([[1, 1, 1, 1, 1, 0, 0]]).expand(3, 7)
    for adds in (False, True):
        for dtype in ("float32", "int8"):
            model = twofour.prune(Looks(adds), "2:4", skip=["table"]).eval()
            fast = quick(model, (ids, mask), dtype=dtype, graph=True)
            for given in ((ids, mask), (ids[:2, :5], mask[:2, :5]), (ids.flip(1), mask)):
                want = fast(*given)
                for types in ((torch.int32, torch.int32), (torch.int64, torch.int32), (torch.int32, torch.int64)):
                    small = tuple(one.to(kind) for one, kind in zip(given, types, strict=True))
                    assert _served(fast, monkeypatch, ids=small[0], mask=small[1]) == (
                        not adds or types[0] is torch.int64
                    )
                    if not adds:
                        assert torch.equal(fast(*small), want)
    assert sum("`ids`" in record.message for record in caplog.records) == 2


class Windows(nn.Module):
    """Overlapping windows by the strides of the input, as Longformer's."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct, self.up, self.down = direct, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape
        x = x if self.direct else torch.sigmoid(x).contiguous()
        found = x.as_strided((n - 1, 2, c), (x.stride(0), x.stride(0), x.stride(1)))
        return self.down(torch.relu(self.up(found)))


@pytest.mark.parametrize("direct", [True, False])
def test_a_call_that_lies_otherwise_is_not_read_by_the_strides_of_the_example(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = twofour.prune(Windows(direct).eval(), "2:4")
    fast = quick(model, torch.randn(12, 64))
    for x in (torch.randn(12, 64), torch.randn(64, 12).t(), torch.randn(12, 64)):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert _served(fast, monkeypatch, x=torch.randn(12, 64))
    assert not _served(fast, monkeypatch, x=torch.randn(64, 12).t())


class Copied(nn.Module):
    """Answers with copies of what the model and the caller keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("table", torch.randn(4, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.down(torch.relu(self.up(x)))
        table, x = self.table.to("cpu", copy=True), x.to(torch.float32, copy=True)
        return y, y.to(torch.float32, copy=True), table, x


def test_copies_among_the_answers_are_tensors_of_their_own() -> None:
    model, x = twofour.prune(Copied(), "2:4"), torch.randn(4, 64)
    fast, before = quick(model, x), x.clone()
    y, copied, table, given = fast(x)
    for answer in (copied, table, given):
        answer.zero_()
    assert torch.equal(x, before) and torch.equal(fast.table, model.table) and y.any()
    assert torch.equal(fast(x)[2], model.table)


def test_a_module_in_training_mode_runs_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 64)).eval()
    fast, x = quick(twofour.prune(model, "2:4"), torch.randn(4, 64)), torch.randn(4, 64)
    assert torch.equal(fast(x), fast(x))
    fast[1].train()
    assert not torch.equal(fast(x), fast(x)) and "with `1` in training mode" in caplog.text
    fast[1].eval()
    assert torch.equal(fast(x), fast(x))


class Noisy(nn.Module):
    """Draws numbers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x + torch.randn_like(x))))


def test_a_model_that_draws_numbers_is_no_fault_of_the_graph() -> None:
    fast = quick(twofour.prune(Noisy(), "2:4"), torch.randn(4, 64), memory="small")
    assert fast.plan.account.engine == "layers" and "differently from call to call" in fast.plan.account.reason


def test_an_input_of_another_width_is_refused_by_the_layer() -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), torch.randn(4, 64))
    with pytest.raises(KernelError, match=r"layer `.*`.*does not fit"):
        fast(torch.randn(2, 63))


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gru = nn.Linear(64, 64), nn.GRU(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(torch.relu(self.up(x)))[0]


def test_the_plan_names_sizes_of_one_that_stay() -> None:
    account = quick(twofour.prune(Steps(), "2:4"), torch.randn(5, 1, 64)).plan.account
    assert "1 on axis 1 of `x`" in account.reason


class Episodes(nn.Module):
    """Resets the states of episodes that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gru = nn.Linear(64, 64), nn.GRU(64, 32, num_layers=2)

    def forward(self, x: Tensor, h: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(torch.relu(self.up(x)), h * (1 - done))


def test_recurrent_layers_of_a_graph_take_states_however_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, done = twofour.prune(Episodes(), "2:4"), torch.randn(5, 3, 64), torch.zeros(3, 1)
    fast = quick(model, (x, torch.randn(2, 3, 32), done), memory="small")
    h = torch.randn(3, 2, 32).transpose(0, 1)
    for got, want in zip(fast(x, h, done), model(x, h, done), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert _served(fast, monkeypatch, x=x, h=h, done=done)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 64), nn.Embedding(8, 64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.down(torch.relu(self.up(x)))


def test_an_index_out_of_range_is_the_models_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, ids = quick(twofour.prune(Embedded(), "2:4"), torch.randint(50, (2, 5))), torch.randint(50, (2, 5))
    assert _served(fast, monkeypatch, ids=ids)
    for wrong in (50, -1):
        ids[1, 2] = wrong
        for _ in range(2):
            with pytest.raises(IndexError):
                fast(ids)
    fast(torch.randint(50, (2, 5)))


@pytest.mark.parametrize(("own", "given"), [(torch.int32, torch.int32), (torch.int64, torch.int32)])
def test_ids_are_bound_once_where_none_is_converted(
    own: torch.dtype, given: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model compiled on int32 was bound in each call, as if its ids were to become int64."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.down = nn.Embedding(50, 64), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(self.table(ids))))

    model = twofour.prune(Table().eval(), "2:4", skip=["table"])
    ids = torch.randint(0, 50, (2, 7))
    fast = quick(model, (ids.to(own),))
    bound: list[int] = []
    monkeypatch.setattr(whole_model, "bind", lambda *given: bound.append(1) or bind(*given))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(ids.to(given)), model(ids), atol=1e-5, rtol=1e-4)
    assert len(bound) <= 1 if own is given else len(bound) == 3

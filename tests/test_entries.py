"""Every public entry answers what it cannot use with an error of ours that says what was got and wanted."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from tests.turns import in_turn
from twofour import (
    allocation,
    checker,
    export,
    importing,
    masks,
    measure,
    permutation,
    pruning,
    quantization,
    training,
)
from twofour.compat import asp, torchao_sparsity
from twofour.errors import (
    CompileError,
    ExportError,
    FormatError,
    LayerError,
    MaskError,
    MeasureError,
    PermutationError,
    RecipeError,
    TrainingError,
    TwofourError,
)
from twofour.layers import walk
from twofour.recipe import Recipe
from twofour.training import gradual, lora, s_ste, sdgp, sr_ste

X = torch.zeros(4, 16)
DATA = [(X, torch.zeros(4).long())]
ARGUMENTS = {
    "loss": F.cross_entropy,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    "epochs": 1,
    "progress": False,
}


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def masked() -> nn.Module:
    return twofour.prune(dense(), "2:4")


def without_its_weight() -> nn.Module:
    model = masked()
    del model[0].weight  # pyright: ignore[reportIndexIssue]
    return model


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    twofour.save(masked(), path)
    return path


# The last field of a row is the error that the entry documents.
TAKE_A_MODEL = {
    "prune": (lambda given, file: twofour.prune(given, "2:4"), LayerError),
    "finetune": (lambda given, file: twofour.finetune(given, DATA, **ARGUMENTS), TrainingError),
    "finetune control": (
        lambda given, file: twofour.finetune(masked(), DATA, control=given, **ARGUMENTS),
        TrainingError,
    ),
    "train": (lambda given, file: training.train(given, DATA, **ARGUMENTS), TrainingError),
    "compile": (lambda given, file: twofour.compile(given, X), CompileError),
    "advise": (lambda given, file: twofour.advise(given), CompileError),
    "save": (lambda given, file: twofour.save(given, file), FormatError),
    "load": (lambda given, file: twofour.load(file, given), FormatError),
    "load masked": (lambda given, file: twofour.load(file, given, masked=True), FormatError),
    "read": (lambda given, file: twofour.read(file, given), LayerError),
    "check": (lambda given, file: twofour.check(given), LayerError),
    "estimate": (lambda given, file: twofour.estimate(given, machine="h200", tokens=4), LayerError),
    "masks.of": (lambda given, file: masks.of(given), LayerError),
    "masks.detach": (lambda given, file: masks.detach(given), LayerError),
    "masks.enforce": (lambda given, file: masks.enforce(given), LayerError),
    "masks.state_dict": (lambda given, file: masks.state_dict(given), LayerError),
    "masks.load_state_dict": (lambda given, file: masks.load_state_dict(given, {}), LayerError),
    "masks.derive": (lambda given, file: masks.derive(given, "2:4"), LayerError),
    "outcomes": (lambda given, file: pruning.outcomes(given), LayerError),
    "permutation_report": (lambda given, file: pruning.permutation_report(given), LayerError),
    "permute": (lambda given, file: permutation.permute(given, X, []), TwofourError),
    "sr_ste": (lambda given, file: sr_ste.attach(given), TrainingError),
    "s_ste": (lambda given, file: s_ste.attach(given), TrainingError),
    "gradual": (lambda given, file: gradual.attach(given, end=4), TrainingError),
    "lora": (lambda given, file: lora.attach(given), TrainingError),
    "both_ways": (lambda given, file: training.both_ways.attach(given, X), TrainingError),
    "sdgp": (lambda given, file: sdgp.attach(given), TrainingError),
    "quantization": (lambda given, file: quantization.attach(given), TrainingError),
    "Taught": (lambda given, file: training.Taught(DATA, given), TrainingError),
    "to_safetensors": (lambda given, file: export.to_safetensors(given, file), CompileError),
    "to_huggingface": (lambda given, file: export.to_huggingface(given, file.parent / "folder"), CompileError),
    "asp": (lambda given, file: asp.ASP().init_model_for_pruning(given), LayerError),
    "apply_fake_sparsity": (lambda given, file: torchao_sparsity.apply_fake_sparsity(given), LayerError),
    "swap back": (lambda given, file: torchao_sparsity.swap_semi_sparse_linear_with_linear(given), LayerError),
    "swap": (lambda given, file: torchao_sparsity.swap_linear_with_semi_sparse_linear(given, {}), LayerError),
}


NO_MODELS = {"number": 5, "dict": {}, "class": nn.Linear, "None": None}
CASES = [(entry, name) for entry in TAKE_A_MODEL for name in NO_MODELS if (entry, name) != ("finetune control", "None")]


@in_turn("entry, name", CASES)
def test_what_is_no_module_is_refused_by_name(entry, name, file):
    given = NO_MODELS[name]
    call, kind = TAKE_A_MODEL[entry]
    before = file.read_bytes()
    with pytest.raises(kind) as caught:
        call(given, file)
    named = {"Linear", "type"} if given is nn.Linear else {type(given).__name__}
    assert any(name in str(caught.value.got) for name in named)
    assert caught.value.wanted and caught.value.remedy
    assert file.read_bytes() == before


@in_turn("skip", [3, None, [None], [3], b"0"], ids=repr)
@in_turn(
    "call",
    [
        lambda skip: twofour.prune(dense(), "2:4", skip=skip),
        lambda skip: twofour.advise(dense(), skip=skip),
        lambda skip: twofour.estimate(dense(), machine="h200", tokens=4, skip=skip),
        lambda skip: masks.derive(masked(), "2:4", skip=skip),
        lambda skip: sr_ste.attach(dense(), skip=skip),
        lambda skip: s_ste.attach(dense(), skip=skip),
        lambda skip: gradual.attach(dense(), end=4, skip=skip),
        lambda skip: sdgp.attach(dense(), skip=skip),
        lambda skip: twofour.check(masked(), include=skip),
    ],
    ids=["prune", "advise", "estimate", "derive", "sr_ste", "s_ste", "gradual", "sdgp", "check"],
)
def test_globs_that_are_no_text(call, skip):
    with pytest.raises((LayerError, RecipeError)) as caught:
        call(skip)
    assert "names no layers" in str(caught.value) and "leave `" in str(caught.value)


@pytest.mark.parametrize("path", [3, None, b"model", "", "a\0b"], ids=repr)
@pytest.mark.parametrize(
    "call, kind",
    [
        (lambda path: twofour.save(masked(), path), FormatError),
        (lambda path: twofour.load(path, dense()), FormatError),
        (lambda path: twofour.read(path, dense()), FormatError),
        (lambda path: export.to_safetensors(masked(), path), FormatError),
        (lambda path: export.to_onnx(masked(), path, X), ExportError),
        (lambda path: export.to_huggingface(masked(), path), ExportError),
        (lambda path: importing.convert(path, "unused"), FormatError),
        (lambda path: Recipe.load(path), RecipeError),
        (lambda path: Recipe.parse("2:4").save(path), RecipeError),
    ],
    ids=[
        "save",
        "load",
        "read",
        "to_safetensors",
        "to_onnx",
        "to_huggingface",
        "convert",
        "recipe.load",
        "recipe.save",
    ],
)
def test_what_names_no_file_is_refused_and_nothing_is_written(call, kind, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match="names no file or folder"):
        call(path)
    assert not list(tmp_path.iterdir())


@in_turn(
    "call, kind, words",
    [
        (lambda: twofour.check(""), FormatError, "names no file"),
        (lambda: twofour.check(masked(), expect={3: "2:4"}), LayerError, "a promise names no weight"),
        (lambda: checker.check_weights(3), LayerError, "a dict of names and tensors"),
        (lambda: checker.check_weights({"a": 3}), LayerError, "int under 'a'"),
        (lambda: checker.check_weights({"a": X}, axes={"a": 7}), LayerError, "a=7"),
        (lambda: masks.load_state_dict(dense(), 3), MaskError, "no state dict"),
        (lambda: masks.load_state_dict(dense(), {3: 3}), MaskError, "a weight the model lacks"),
        (lambda: sdgp.attach(dense(), eps="x"), TwofourError, "`eps` is impossible"),
        (lambda: twofour.advise(dense(), tokens=3), CompileError, "token counts are impossible"),
        (lambda: twofour.advise(dense(), tokens=[1, 10**15]), CompileError, "does not fit into memory"),
        (lambda: twofour.compile(dense(), X, tokens=[10**15]), CompileError, "does not fit into memory"),
        (lambda: twofour.estimate(dense(), machine=[], tokens=4), TwofourError, "unknown"),
        (lambda: export.to_onnx(masked(), "unused", X, tolerance="x"), ExportError, "`tolerance` is impossible"),
        (lambda: importing.write(3, "unused"), FormatError, "nothing that was decoded"),
        (lambda: training.Taught(None, dense()), TrainingError, "there is no loader"),
        (lambda: training.distilled(None), TrainingError, "`loss` cannot be called"),
        (lambda: training.distilled(F.cross_entropy, weight="x"), TrainingError, "distillation is impossible"),
        (lambda: training.distilled(F.cross_entropy, answer=3), TrainingError, "`answer` cannot be called"),
        (lambda: measure.compare({"a": list}, threads=10**8), MeasureError, "threads=100000000"),
        (lambda: measure.require_threads("2"), MeasureError, "threads='2'"),
        (lambda: measure.compare(candidates=3), MeasureError, "int"),
        (lambda: measure.compare({"a": 3}), MeasureError, "candidate `a` cannot be called"),
        (lambda: masks.attach(3, X, "2:4"), MaskError, "no weight to put a mask on"),
        (lambda: masks.attach(walk(dense()).weights[0], 3, "2:4"), MaskError, "PrunableWeight and int"),
        (lambda: permutation.permute(dense(), X, 3), PermutationError, "no list of weights"),
        (lambda: permutation.permute(dense(), X, [3]), PermutationError, "no list of weights"),
        (lambda: permutation.permute(dense(), X, [(3, "2:4")]), PermutationError, "no list of weights"),
        (lambda: permutation.permute(dense(), X, [], scores=3), PermutationError, "the scores are no mapping"),
        (lambda: allocation.sensitivity(dense(), DATA, patterns=3), RecipeError, "patterns=3"),
        (lambda: export.to_onnx(masked(), "unused", X, dtype="int8", data=3), ExportError, "data=3"),
        (lambda: twofour.check(masked(), progress=3), LayerError, "`progress` cannot be called"),
        (lambda: sr_ste.attach(dense(), decay=math.inf), TrainingError, "decay"),
        (lambda: training.both_ways.attach(dense(), X, decay=math.inf), TrainingError, "decay=inf"),
    ],
)
def test_arguments_that_cannot_be_used(call, kind, words):
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("changes", [{"memory": 3}, {"tokens": 3}, {"tokens": "8"}, {"tokens": [None]}], ids=repr)
def test_load_refuses_what_compile_refuses(changes, file):
    with pytest.raises(CompileError) as caught:
        twofour.load(file, dense(), **changes)
    assert caught.value.wanted


@pytest.mark.parametrize("changes", [{"rank": 10**6}, {"rank": 17}, {"layers": 3}, {"layers": None}, {"seed": "x"}])
def test_an_adapter_that_cannot_be(changes):
    model = masked()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrainingError) as caught:
        lora.attach(model, **changes)
    assert caught.value.wanted and caught.value.remedy
    assert list(masks.of(model)) == ["0.weight", "2.weight"]
    assert model.state_dict().keys() == before.keys()


def test_an_adapter_of_full_rank_is_the_largest():
    with pytest.raises(TrainingError, match=r"layer `0.weight`(.|\n)*rank=17 for a weight \(32, 16\)(.|\n)*at most 16"):
        lora.attach(masked(), rank=17)
    assert lora.attach(masked(), rank=16).layers == ("0.weight", "2.weight")


def test_a_schedule_without_steps_is_none():
    with pytest.raises(TrainingError, match="end=0"):
        gradual.attach(dense(), end=0)


@pytest.mark.parametrize("layers", [3, None])
def test_quantisation_of_layers_that_are_no_glob(layers):
    with pytest.raises(TrainingError, match="`layers` is no glob"):
        quantization.attach(masked(), layers=layers)


@in_turn(
    "call",
    [
        lambda model, file: twofour.check(model),
        lambda model, file: twofour.save(model, file),
        lambda model, file: twofour.finetune(model, DATA, **ARGUMENTS),
        lambda model, file: masks.enforce(model),
        lambda model, file: lora.attach(model),
        lambda model, file: quantization.attach(model),
        lambda model, file: export.to_safetensors(model, file),
    ],
    ids=["check", "save", "finetune", "enforce", "lora", "quantization", "to_safetensors"],
)
def test_a_masked_module_that_lost_its_weight_is_named(call, file):
    with pytest.raises(MaskError, match=r"`0\.weight` can no longer be kept 2:4"):
        call(without_its_weight(), file)


def test_a_mask_that_was_let_go_has_no_parameter():
    model = masked()
    mask = masks.of(model)["0.weight"]
    assert mask.parameter is model.get_parameter("0.weight")
    masks.detach(model)
    with pytest.raises(MaskError, match="attached no more"):
        _ = mask.parameter

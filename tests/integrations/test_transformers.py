"""`from_pretrained(folder, quantization_config=TwoFourConfig())`: three kinds of folders in, folders out."""

import copy
import json
import logging
import pickle

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.quantizers import auto

import twofour
from tests.integrations.folders import SENTENCES, folder_of, model_of, packed_folder, with_tokenizer
from twofour import progress
from twofour.checkpoints import Checkpoint, read_header, write_tensors
from twofour.errors import CompileError, DataError, ExportError, FormatError
from twofour.export.digest import DIGEST
from twofour.export.file import parts_of
from twofour.export.save_load import contents_of
from twofour.integrations import TwoFourConfig
from twofour.integrations.folder import Packed, _is_dense


@pytest.fixture(autouse=True)
def _cached(times_cache, monkeypatch):
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of one BERT: dense, with zeros."""
    where = tmp_path_factory.mktemp("bert")
    dense = model_of("BertModel")
    zeros = twofour.prune(copy.deepcopy(dense), "2:4")
    return {"dense": folder_of(dense, where / "dense"), "zeros": folder_of(zeros, where / "zeros"), "where": where}


def calls(folder):
    """Batches of several sizes and lengths, one sentence too."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        dict(tokenizer(part, padding=True, return_tensors="pt")) for part in (SENTENCES, SENTENCES[:1], SENTENCES[2:4])
    ]


@torch.inference_mode()
def alike(one, other, inputs, tolerance=1e-5):
    for given in inputs:
        found, wanted, mask = one(**given)[0], other(**given)[0], given.get("attention_mask")
        if mask is not None and found.shape[:2] == mask.shape:  # a graph answers zeros at padding
            found, wanted = found[mask == 1], wanted[mask == 1]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert type(one(**given)) is type(other(**given))


def test_a_folder_with_zeros_runs_sparse_at_every_size(places, caplog):
    plain = AutoModel.from_pretrained(places["zeros"])
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig())
    assert type(fast) is type(plain) and not fast.training and twofour.check(fast).ok
    assert sum(layer.kind == "Linear" for layer in fast.plan.layers) >= 13 and fast.plan.account is not None
    with caplog.at_level(logging.WARNING):
        alike(fast, plain, calls(places["zeros"]))
        alike(fast, plain, [{**given, "return_dict": True} for given in calls(places["zeros"])])
    assert "layer by layer" not in caplog.text and "is dense" not in caplog.text
    assert not hasattr(fast.config, "quantization_config")
    assert all(module.config is fast.config for module in fast.modules() if hasattr(module, "config"))


def test_a_dense_folder_stays_as_it_is_and_a_warning_says_so(places, caplog):
    plain = AutoModel.from_pretrained(places["dense"])
    fast = AutoModel.from_pretrained(places["dense"], quantization_config=TwoFourConfig(graph=False))
    assert "is dense and stays so" in caplog.text and "in float32" in caplog.text
    assert f"twofour optimize {places['dense']}" in caplog.text
    alike(fast, plain, calls(places["dense"]))


def test_a_dense_folder_is_pruned_where_that_is_asked_for(places, caplog):
    config = TwoFourConfig(prune="2:4", skip="pooler*", graph=False)
    fast = AutoModel.from_pretrained(places["dense"], quantization_config=config)
    assert "by magnitude, without data" in caplog.text
    plain = twofour.prune(AutoModel.from_pretrained(places["dense"]), "2:4", skip="pooler*")
    alike(fast, plain, calls(places["dense"]))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(SENTENCES, id="texts"),
        pytest.param(list(zip(SENTENCES, SENTENCES[::-1], strict=True)), id="pairs", marks=pytest.mark.long),
    ],
)
def test_sentences_calibrate(places, caplog, data):
    config = TwoFourConfig(prune="2:4", data=data, graph=False)
    fast = AutoModel.from_pretrained(places["dense"], quantization_config=config)
    assert "in one shot on the data" in caplog.text
    tokenizer = AutoTokenizer.from_pretrained(places["dense"])
    alone = data is SENTENCES
    data = sorted(data, key=len if alone else lambda pair: len(pair[0]) + len(pair[1]))  # of like length side by side
    given = [data] if alone else [[a for a, _ in data], [b for _, b in data]]
    batch = dict(tokenizer(*given, padding=True, truncation=True, max_length=78, return_tensors="pt"))
    plain = twofour.prune(AutoModel.from_pretrained(places["dense"]), "2:4", data=[batch], progress=False)
    alike(fast, plain, calls(places["dense"]))


def test_data_without_sentences_are_refused(places):
    for data, said in (([], "no sentences"), ("one text", "no sentences")):
        config = TwoFourConfig(prune="2:4", data=data)
        with pytest.raises(DataError, match=said):
            AutoModel.from_pretrained(places["dense"], quantization_config=config)


@pytest.mark.long
def test_pruning_while_loading_shows_its_progress_unless_transformers_bars_are_off(places, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.002)
    config = TwoFourConfig(prune="2:4", data=SENTENCES, graph=False)
    AutoModel.from_pretrained(places["dense"], quantization_config=config)
    assert not capsys.readouterr().err
    transformers.utils.logging.enable_progress_bar()
    AutoModel.from_pretrained(places["dense"], quantization_config=config)
    assert "pruning weights: " in capsys.readouterr().err


def same_weights(one, other):
    """What both hold is equal to the bit; which kernels were the faster ones on a busy machine may differ."""
    found, wanted = contents_of(one), contents_of(other)
    assert found.packed.keys() == wanted.packed.keys() and found.plain.keys() == wanted.plain.keys()
    for name, weight in wanted.packed.items():
        for part, tensor in parts_of(name, weight).items():
            assert torch.equal(parts_of(name, found.packed[name])[part], tensor), part
    for name, tensor in wanted.plain.items():
        assert torch.equal(found.plain[name], tensor), name


ROUNDED = {"float32": 1e-5, "bfloat16": 0.05, "int8": 0.05, "int4": 0.05}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.long)])
def test_a_packed_folder_is_loaded_without_dense_weights(places, tmp_path, dtype, caplog, monkeypatch):
    plain = AutoModel.from_pretrained(places["zeros"])
    inputs = calls(places["zeros"])
    made = twofour.compile(plain, inputs[0], dtype, memory="small")
    folder = packed_folder(made, tmp_path / "packed")
    held, load = [], Packed.loaded

    def seen(self, model, *rest):
        held.extend(name for name, tensor in model.named_parameters() if not tensor.is_meta)
        return load(self, model, *rest)

    monkeypatch.setattr(Packed, "loaded", seen)
    fast = AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig())
    assert "embeddings.word_embeddings.weight" in held  # what transformers has loaded by then
    assert [name for name in held if "encoder" in name and "LayerNorm" not in name] == []
    held = [name for name, _ in fast.named_parameters()]
    assert [name for name in held if "encoder" in name and "LayerNorm" not in name and "bias" not in name] == []
    same_weights(fast, made)
    alike(fast, made, inputs, ROUNDED[dtype])
    assert (fast.plan.dtype, fast.plan.memory) == (dtype, "small") and "layer by layer" not in caplog.text
    assert not any(tensor.is_meta for tensor in (*fast.parameters(), *fast.buffers()))


@pytest.mark.long
def test_a_masked_packed_folder_takes_any_computing_type(places, tmp_path):
    masked = twofour.prune(AutoModel.from_pretrained(places["dense"]), "2:4")
    folder = packed_folder(masked, tmp_path / "packed")
    for dtype, tolerance in ((None, 1e-5), ("int8", 0.1)):
        fast = AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig(dtype))
        alike(fast, masked, calls(folder), tolerance)
        assert fast.plan.dtype == (dtype or "float32")


@pytest.mark.long
def test_a_packed_folder_in_several_files(places, tmp_path):
    made = twofour.compile(AutoModel.from_pretrained(places["zeros"]), calls(places["zeros"])[0])
    folder = packed_folder(made, tmp_path / "packed")
    (folder / "model.safetensors").unlink()
    twofour.save(made, folder, max_shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    fast = AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig())
    same_weights(fast, made)
    alike(fast, made, calls(folder))


def test_what_a_packed_folder_cannot_be(places, tmp_path, monkeypatch):
    made = twofour.compile(AutoModel.from_pretrained(places["zeros"]), tokens=(1,))
    folder = packed_folder(made, tmp_path / "packed")
    with monkeypatch.context() as without, pytest.raises(RuntimeError, match="mismatch"):
        without.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "twofour")  # what transformers knows without us
        AutoModel.from_pretrained(folder)
    with pytest.raises(CompileError, match="holds float32"):
        AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig("int8"))
    with pytest.raises(CompileError, match="sparse already"):
        AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig(prune="2:4"))
    with pytest.raises(FormatError, match=r"BertModel\.from_pretrained"):
        AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=TwoFourConfig())
    tensors, said = Checkpoint.open_all(folder / "model.safetensors")[1], read_header(folder / "model.safetensors")
    (held,) = tensors.values()
    held["encoder.layer.0.output.dense.weight.values"] = torch.zeros(3)
    changed = {key: text for key, text in said.metadata.items() if key != DIGEST}
    write_tensors(folder / "model.safetensors", held, changed)
    with pytest.raises(FormatError, match=r"encoder\.layer\.0\.output\.dense"):
        AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig())


def test_only_the_cpu(places):
    with pytest.raises(CompileError, match=r"device_map=.*cuda"):
        AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig(), device_map="cuda")
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig(graph=False), device_map="cpu")
    assert fast.device.type == "cpu"


@pytest.mark.parametrize("key", [False, pytest.param(True, marks=pytest.mark.long)])
def test_plain_weights_out_are_dense_for_transformers_and_the_same_for_us(places, tmp_path, monkeypatch, key, recwarn):
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig(config_key=key, graph=False))
    fast.save_pretrained(tmp_path / "out")
    with_tokenizer(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization_config" in said) is key and said["twofour"]["patterns"] == {"2:4": 13}
    assert twofour.check(tmp_path / "out").ok
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("config.json", "model.safetensors", "vocab.txt")}
    assert len(modes) == 1, "whoever may read one may read all"
    again = AutoModel.from_pretrained(tmp_path / "out", **({} if key else {"quantization_config": TwoFourConfig()}))
    assert again.plan.layers
    with monkeypatch.context() as without:
        without.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "twofour")  # what transformers knows without us
        plain = AutoModel.from_pretrained(tmp_path / "out")
    before = AutoModel.from_pretrained(places["zeros"])
    assert not hasattr(plain, "plan") and plain.state_dict().keys() == before.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
    alike(again, fast, calls(places["zeros"]))


LONG = [pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float32", "bfloat16", "int8", "int4")]


@pytest.mark.parametrize("dtype", LONG)
def test_packed_weights_come_back_to_the_bit(places, tmp_path, dtype):
    config = TwoFourConfig(dtype, packed=True)
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=config)
    fast.save_pretrained(tmp_path / "out")
    with_tokenizer(tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out")  # the key names us
    assert again.plan.dtype == dtype
    same_weights(again, fast)
    alike(again, fast, calls(places["zeros"]), ROUNDED[dtype])
    again.save_pretrained(tmp_path / "plain", packed=False, config_key=False)
    plain = AutoModel.from_pretrained(tmp_path / "plain")
    assert {tensor.dtype for tensor in plain.parameters()} == {torch.float32}
    assert twofour.check(tmp_path / "plain").ok


def test_tables_are_kept_in_fewer_bits_and_travel(places, tmp_path):
    config = TwoFourConfig(embeddings="int8", graph=False, packed=True)
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=config)
    assert fast.plan.embeddings == "int8"
    fast.save_pretrained(tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out")  # the key says it, and the file
    assert again.plan.embeddings == "int8"
    alike(again, fast, calls(places["zeros"]))
    other = TwoFourConfig(embeddings="bfloat16")
    with pytest.raises(CompileError, match=r"another type of embeddings\n.*'bfloat16'; .* holds int8"):
        AutoModel.from_pretrained(packed_folder(fast, tmp_path / "other"), quantization_config=other)


def test_tables_in_fewer_bits_leave_the_computing_type_as_it_is(tmp_path):
    """A packed folder with masks was computed in float32 then, whatever its own type."""
    half = twofour.prune(model_of("BertModel").bfloat16(), "2:4", criterion="magnitude")
    config = TwoFourConfig(embeddings="int8", graph=False)
    fast = AutoModel.from_pretrained(packed_folder(half, tmp_path / "masked"), quantization_config=config)
    assert (fast.plan.dtype, fast.plan.embeddings) == ("bfloat16", "int8")


@pytest.mark.long
def test_a_dense_folder_of_int8_is_packed_in_int8(places, tmp_path):
    fast = AutoModel.from_pretrained(places["dense"], quantization_config=TwoFourConfig("int8", packed=True))
    fast.save_pretrained(tmp_path / "packed")
    contents = twofour.export.read(tmp_path / "packed")
    linear = {f"{name}.weight" for name, one in model_of("BertModel").named_modules() if isinstance(one, nn.Linear)}
    assert {name for name, weight in contents.packed.items() if weight.header.pattern == "dense"} == linear
    assert not (tmp_path / "packed" / "tokenizer_config.json").exists()  # the graph of the file says what a call has
    again = AutoModel.from_pretrained(tmp_path / "packed")
    for given in calls(places["dense"]):
        assert torch.equal(again(**given)[0], fast(**given)[0])


def test_what_cannot_be_saved_packed(places, tmp_path):
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig(graph=False))
    with pytest.raises(ExportError, match="needs its key"):
        fast.save_pretrained(tmp_path / "out", packed=True, config_key=False)
    with pytest.raises(ExportError, match="push_to_hub"):
        fast.save_pretrained(tmp_path / "out", packed=True, push_to_hub=True)
    with pytest.raises(FormatError, match="another program"):
        fast.save_pretrained(places["dense"], packed=True)


@pytest.mark.long
def test_copies_and_pickles_save_themselves(places, tmp_path):
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=TwoFourConfig())
    for name, twin in (("copy", copy.deepcopy(fast)), ("pickle", pickle.loads(pickle.dumps(fast)))):
        alike(twin, fast, calls(places["zeros"]), 0)
        twin.encoder.layer[0].output.dense.bias.fill_(3)
        twin.save_pretrained(tmp_path / name)
        plain = AutoModel.from_pretrained(tmp_path / name)
        assert (plain.encoder.layer[0].output.dense.bias == 3).all()
        assert not (fast.encoder.layer[0].output.dense.bias == 3).any()


@pytest.mark.long
def test_a_head_and_pipelines(tmp_path):
    folder = folder_of(twofour.prune(model_of("BertForSequenceClassification"), "2:4"), tmp_path / "head")
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    fast = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=TwoFourConfig())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for task in ("text-classification", "feature-extraction"):
        found, wanted = (
            pipeline(task, model=model, tokenizer=tokenizer)(SENTENCES, batch_size=3) for model in (fast, plain)
        )
        if task == "text-classification":
            assert [one["score"] for one in found] == pytest.approx([one["score"] for one in wanted], abs=1e-5)
        else:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_tied_decoder_generates_and_travels_packed(tmp_path):
    folder = folder_of(twofour.prune(model_of("GPT2LMHeadModel"), "2:4"), tmp_path / "gpt2")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    fast = AutoModelForCausalLM.from_pretrained(folder, quantization_config=TwoFourConfig())
    prompt = torch.randint(5, 128, (2, 7), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(prompt, **options)
    assert torch.equal(fast.generate(prompt, **options), wanted)
    fast.save_pretrained(tmp_path / "packed", packed=True)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "packed").generate(prompt, **options), wanted)
    fast.save_pretrained(tmp_path / "plain")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").generate(prompt, **options), wanted)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "ViTModel"])
def test_other_inputs(tmp_path, kind):
    folder = tmp_path / kind
    twofour.prune(model_of(kind), "2:4").save_pretrained(folder)
    load = getattr(transformers, kind).from_pretrained
    plain, fast = load(folder), load(folder, quantization_config=TwoFourConfig())
    ids = torch.randint(5, 128, (3, 9), generator=torch.Generator().manual_seed(0))
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    given = {"pixel_values": pixels} if kind == "ViTModel" else {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
    alike(fast, plain, [given])


@pytest.mark.long
def test_training_is_refused_and_bfloat16_folders_stay_bfloat16(places):
    config = TwoFourConfig()
    fast = AutoModel.from_pretrained(places["zeros"], quantization_config=config, dtype=torch.bfloat16)
    assert not fast.hf_quantizer.is_trainable and fast.plan.dtype == "bfloat16"
    assert fast.embeddings.word_embeddings.weight.dtype == torch.bfloat16
    half = AutoModel.from_pretrained(places["zeros"], quantization_config=config, dtype=torch.float16)
    assert half.plan.dtype == "float32" and isinstance(half.embeddings.LayerNorm, nn.LayerNorm)
    alike(half, AutoModel.from_pretrained(places["zeros"]), calls(places["zeros"]), 1e-2)


@pytest.mark.long
def test_a_dense_compiled_folder_keeps_its_type_and_its_graph(places, tmp_path, caplog):
    dense, (example, *_) = AutoModel.from_pretrained(places["dense"]), calls(places["dense"])
    made = twofour.compile(dense, example, "bfloat16", tokens=(1,), effort="quick")
    folder = packed_folder(made, tmp_path / "dense")
    fast = AutoModel.from_pretrained(folder, quantization_config=TwoFourConfig())
    assert fast.plan.dtype == "bfloat16" and fast.plan.account.engine == made.plan.account.engine
    torch.testing.assert_close(fast(**example).last_hidden_state, made(**example).last_hidden_state, rtol=0, atol=0)
    assert "captured again" not in caplog.text and "layer by layer" not in caplog.text


def test_a_dense_compiled_folder_is_plain_where_more_is_asked_for():
    file = {"kind": "compiled", "dtype": "bfloat16", "patterns": {}}
    assert _is_dense(file, TwoFourConfig()) and _is_dense(file, TwoFourConfig("bfloat16"))
    assert not _is_dense(file, TwoFourConfig("int8")) and not _is_dense(file, TwoFourConfig(prune="2:4"))
    assert not _is_dense(file | {"patterns": {"w": "2:4"}}, TwoFourConfig()), "plain weights with zeros"
    assert not _is_dense({"kind": "plain"}, TwoFourConfig())

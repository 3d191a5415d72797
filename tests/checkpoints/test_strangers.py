"""Folders of strangers: no connection is opened, only classes of models are made, and they have limits."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.small import random
from twofour.checkpoints import Checkpoint, empty_model, limits, structure
from twofour.checkpoints.offline import Refused, offline
from twofour.cli import huggingface
from twofour.errors import SourceError, TwofourError

BERT = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
BERT |= {"num_hidden_layers": 1, "vocab_size": 64, "architectures": ["BertModel"]}

ELSEWHERE: dict[str, dict[str, Any]] = {
    "a backbone": {
        "model_type": "upernet",
        "architectures": ["UperNetForSemanticSegmentation"],
        "backbone": "microsoft/resnet-18",
        "use_pretrained_backbone": True,
        "backbone_config": None,
        "hidden_size": 16,
    },
    "timm's backbone": {
        "model_type": "timm_backbone",
        "architectures": ["TimmBackbone"],
        "backbone": "hf-hub:stranger/model",
        "use_pretrained_backbone": True,
    },
    "code": {
        "model_type": "new",
        "auto_map": {"AutoConfig": "stranger/model--c.C", "AutoModel": "stranger/model--c.M"},
    },
    "code of a known model": BERT | {"auto_map": {"AutoConfig": "stranger/model--c.C", "AutoModel": "c.M"}},
    "a kernel": BERT | {"attn_implementation": "stranger/kernel", "_attn_implementation": "stranger/kernel"},
    "kernels": BERT | {"use_kernels": True, "experts_implementation": "stranger/kernel"},
    "quantization": BERT
    | {"quantization_config": {"quant_method": "gptq", "bits": 4, "dataset": "c4", "tokenizer": "stranger/t"}},
    "another name": BERT | {"_name_or_path": "stranger/model"},
    "other files": BERT | {"configuration_files": ["config.9.9.json", "config.1.0.json"]},
    "a function": BERT | {"architectures": ["set_seed"]},
    "a tokenizer": BERT | {"architectures": ["BertTokenizer"]},
    "a module": BERT | {"architectures": ["models"]},
    "an attribute": BERT | {"architectures": ["__class__"]},
    "no name": BERT | {"architectures": ["../../etc", 7, ""]},
}

CHILD = """
import json, sys, pathlib
asked = []
sys.addaudithook(lambda event, given: asked.append((event, str(given))) if event.startswith("socket.") else None)
import twofour
from twofour.cli import huggingface
from twofour.recipe import Recipe
from twofour.checkpoints import Checkpoint
from twofour.streaming import plan_folder
from twofour.importing import decode
import socket
socket.socket().close()
assert asked, "the hook sees sockets"
asked.clear()
done = {}
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    said = done[folder.name] = []
    calls = [twofour.check, huggingface.load]
    if folder.name in ("a backbone", "code"):
        calls += [huggingface.tokenizer, decode, lambda path: plan_folder(Checkpoint.open(path), Recipe.parse("2:4"))]
    for call in calls:
        try:
            said.append(type(call(folder)).__name__)
        except twofour.errors.TwofourError as error:
            said.append(str(error))
    assert not asked, (folder.name, asked)
print(json.dumps(done))
"""


def folder(path: Path, config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"pooler.dense.weight": torch.zeros(32, 32)}, path / "model.safetensors")
    code = {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["stranger/model--t.T", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps({**code, "name_or_path": "stranger/model"}))
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "stranger/model"}))
    return path


def test_no_connection_is_asked_for_and_no_function_is_called(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    (tmp_path / "all").mkdir()
    for name, config in ELSEWHERE.items():
        folder(tmp_path / "all" / name, config)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "all")]
    environment = {"PATH": "", "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert "lies elsewhere" in said["a backbone"][0] and "backbone_config" in said["a backbone"][0]
    for name in ("a function", "an attribute", "a tokenizer", "a module"):
        assert "is no class of a model" in said[name][0] and "is no class of a model" in said[name][1], said[name]
    for name in ("code of a known model", "a kernel", "kernels", "another name", "other files", "no name"):
        assert said[name][:2] == ["Report", "BertModel"], said[name]
    assert "code of its own is never run" in said["code"][0]


def test_this_thread_is_refused_and_others_keep_their_connections() -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra [text]")
    found: list[object] = []

    def elsewhere() -> None:
        found.append(bool(constants.HF_HUB_OFFLINE))
        with socket.socket(socket.AF_UNIX) as one:
            found.append(one.connect_ex("/nowhere"))

    before, own = constants.HF_HUB_OFFLINE, socket.getaddrinfo
    with offline(), offline():
        assert constants.HF_HUB_OFFLINE
        with socket.socket(socket.AF_UNIX) as one, pytest.raises(Refused):
            one.connect("/nowhere")
        with pytest.raises(Refused):
            socket.getaddrinfo("localhost", 80)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [bool(before), 2]  # no such file: it was tried
    assert constants.HF_HUB_OFFLINE is before and socket.getaddrinfo is own and "connect" not in vars(socket.socket)


@pytest.mark.parametrize(
    ("entry", "most"),
    [
        ("num_hidden_layers", limits.LAYERS),
        ("depths", limits.LAYERS),
        ("num_labels", limits.COUNT),
        ("max_position_embeddings", limits.POSITIONS),
    ],
)
def test_numbers_of_a_config_have_limits(entry: str, most: int) -> None:
    limits.require_modest({"inner": [{entry: most}], "rope_theta": 1 << 40, entry: [most // 2, most // 2]})
    with pytest.raises(ValueError, match=rf"`{entry}` of {most + 1}.*at most {most}"):
        limits.require_modest({"inner": [{entry: most + 1}]})


def test_a_config_of_a_million_layers_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    with pytest.raises(SourceError, match=r"`num_hidden_layers` of 1000000, at most 2048"):
        empty_model(folder(tmp_path / "model", BERT | {"num_hidden_layers": 1_000_000}))


def test_modules_are_counted_while_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    path = folder(tmp_path / "model", BERT)
    count = sum(len(module._modules) for module in empty_model(path).modules())
    monkeypatch.setattr(limits, "MODULES", count)
    empty_model(path)
    monkeypatch.setattr(limits, "MODULES", count - 1)
    with pytest.raises(SourceError, match=f"more than {count - 1} modules"):
        empty_model(path)


def test_a_loop_without_modules_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.3)

    def count_for_ever() -> None:
        number = 0
        while True:
            with contextlib.suppress(Exception):  # as libraries have it
                number += 1

    with pytest.raises(ValueError, match=r"more than 0\.3 seconds"), limits.limited():
        count_for_ever()
    with limits.limited():
        sum(range(1000))  # and what is quick passes


def test_a_model_far_larger_than_its_files_is_not_filled_at_random(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    path = folder(tmp_path / "model", BERT | {"vocab_size": 1 << 30})
    with pytest.raises(SourceError, match=r"a model of 137439\d+ bytes, 4096 bytes in the files"):
        huggingface.load(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra [text]")
    path = folder(tmp_path / "model", BERT)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    for call in (huggingface.load, huggingface.tokenizer):
        with pytest.raises(TwofourError, match=r"a pipe|no weights|no tokenizer"):
            call(path)


def test_what_transformers_makes_of_a_folder_stays_the_same(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    path = random(tmp_path / "bert", "BertConfig", "BertForMaskedLM", vocab_size=64, **sizes)
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    want: Any = transformers.BertForMaskedLM.from_pretrained(path)
    found: Any = huggingface.load(path)
    assert type(found) is type(want) and found.config.to_dict() == want.config.to_dict()
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in want.state_dict().items())
    assert type(structure(Checkpoint.open(path)).model) is type(want)


PROFILED = """
import cProfile
from twofour.checkpoints import limits

def work():
    return sum(range(10))

for _ in range(3):
    with limits.limited():
        work()
cProfile.Profile().runcall(work)
limits.SECONDS = 0.2
try:
    with limits.limited():
        while True:
            work()
except ValueError as error:
    assert "more than 0.2 seconds" in str(error)
cProfile.Profile().runcall(work)
"""


def test_a_limit_leaves_the_interpreter_as_it_was() -> None:
    """A flag that is left up slows every call from then on, and ends no more in a profiler."""
    ended = subprocess.run([sys.executable, "-c", PROFILED], timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

"""Every block of Python on a page runs: the blocks of a page in their order, in one namespace, in an empty folder.

A page says what its names are and leaves out how they come about: `GIVEN` makes them, small. A line of three dots
stands for the reader's own training loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twofour.compat.asp import ASP

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
DOTS = re.compile(r"^\.\.\.(?= *#|$).*$", re.M)

START = """
import numpy as np
import torch
import twofour
from torch import nn
from torch.nn import functional as F

def made(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers or (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))).eval()

def loop():
    for given, wanted in loader:
        optimizer.zero_grad()
        loss(model(given), wanted).backward()
        optimizer.step()

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)

def make_schedule(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

model, example, loss = made(), torch.randn(8, 32), F.mse_loss
x = example
loader = [(torch.randn(8, 32), torch.randn(8, 32)) for _ in range(2)]
optimizer = make_optimizer(model.parameters())
"""
"""What the names mean everywhere, unless a page says otherwise."""

MASKED = "model = twofour.prune(made(), '2:4')"
CLASSES = "loader = [(torch.randn(8, 32), torch.randint(0, 32, (8,))) for _ in range(2)]"
NETWORK = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
    def forward(self, x):
        return x + self.fc(x).relu()

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Module(), nn.Linear(32, 32)
        self.encoder.layer = nn.ModuleList(Layer() for _ in range(6))
    def forward(self, x):
        for layer in self.encoder.layer:
            x = layer(x)
        return self.head(x)
"""
LLAMA = """
import transformers
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=2, vocab_size=32)
transformers.LlamaForCausalLM(config).save_pretrained("path/to/folder")
"""
HUGGING_FACE = """
import transformers
from twofour.recipe import Recipe
recipe = Recipe.parse("2:4")
config = transformers.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                 vocab_size=32)
model = transformers.BertModel(config).eval()
model.save_pretrained("dense-folder")
model = twofour.prune(model, recipe)
"""
ASP_CHECKPOINT = """
from pathlib import Path
from safetensors.torch import save_file
state = dict(twofour.prune(made(), "2:4").state_dict())
state |= {f"{name}.__weight_mma_mask": state[f"{name}.weight"] != 0 for name in ("0", "2")}
Path("old-checkpoint").mkdir()
save_file(state, "old-checkpoint/model.safetensors")
"""
SYSTOLIC = """
from twofour.hardware.systolic import Layer, Settings, SystolicArray
x, w = np.random.default_rng(0).standard_normal((8, 32)), np.random.default_rng(1).standard_normal((8, 4, 16))
w[:, 1:3] = 0
w = w.reshape(32, 16)
layer = Layer("one", 8, 8, 3, 3, 4, 8, 1, 1, 1)
settings = Settings("run", SystolicArray(8, 8, "ws"), (64, 64, 64), (0, 10**7, 2 * 10**7), None, None, None, 0)
"""
GRAPH = """
nodes, edges = 8, np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]])
random = np.random.default_rng(0)
x = random.standard_normal((nodes, 8)) * (random.random((nodes, 8)) < 0.4)
w0, w1, b0, b1 = random.standard_normal((8, 8)), random.standard_normal((8, 4)), np.zeros(8), np.zeros(4)
"""

GIVEN: dict[str, dict[int, str]] = {
    "allocation": {0: "data = loader"},
    "check": {},
    "checkpoints": {0: LLAMA},
    "criteria": {0: "twofour.prune(model, '2:4', data=loader)"},
    "export": {0: MASKED, 2: "example, loader = torch.randn(1, 64), [torch.randn(8, 64)]", 3: HUGGING_FACE},
    "guide": {
        0: NETWORK + "model = Network().eval()",
        1: "model = Network().eval()",
        2: "model = made()",
        3: "import copy\nmodel, accuracy = made(), lambda model: -loss(model(x), loader[0][1]).item()",
        9: "dense, ours = lambda: made()(example), lambda: fast(example)",
    },
    "hardware": {1: SYSTOLIC, 2: GRAPH},
    "importing": {0: ASP_CHECKPOINT},
    "low_bits": {1: "build_model = made"},
    "migration": {1: "model = made()"},
    "permutation": {},
    "recurrent": {},
    "rewriting": {0: "model = made(nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))"},
    "runtime": {},
    "sdgp": {},
    "sparse_tensor_core": {},
    "sparse_training": {},
    "training": {
        1: "model = made()",
        2: "model = made()\noptimizer = make_optimizer(model.parameters())",
        3: "model = made()",
        4: "model = made()\noptimizer = make_optimizer(model.parameters())",
        5: "model = made()\nschedule = twofour.training.gradual.attach(model, '1:4', begin=100, end=1000)\n"
        "optimizer = make_optimizer(model.parameters())",
        6: "model = made()\noptimizer = make_optimizer(model.parameters())",
        7: "model, dense = made(), made()\noptimizer = make_optimizer(model.parameters())",
        8: "model = made()",
        9: f"{MASKED}\n{CLASSES}",
        10: NETWORK + f"model, dense, loss = twofour.prune(Network(), '2:4'), Network(), F.cross_entropy\n{CLASSES}",
        11: f"{MASKED}\naverage = torch.optim.swa_utils.AveragedModel(model)",
        12: f"{MASKED}\nloss, loader = F.mse_loss, [(torch.randn(8, 32), torch.randn(8, 32)) for _ in range(2)]\n"
        "optimizer = make_optimizer(model.parameters())",
    },
}
"""Page -> number of a block -> what is given before it."""

SLOW = {
    "allocation",
    "checkpoints",
    "export",
    "guide",
    "hardware",
    "migration",
    "rewriting",
    "sparse_training",
    "training",
}
"""Pages that take more than a second."""

ELSEWHERE = {
    "README": "tests/test_docs.py",
    "blocks": "tests/test_docs.py",
    "deploy_cnn": "tests/test_docs.py",
    "deploy_encoder": "tests/test_docs.py",
    "deploy_llm": "tests/test_docs.py",
    "huggingface": "tests/integrations/test_sentence_transformers.py",
    "hybrid": "tests/test_docs.py",
    "onnxruntime": "tests/export/test_onnxruntime.py",
    "optimize": "tests/cli/test_optimize.py",
    "shrink": "tests/test_docs.py",
}
"""Pages whose blocks another file runs."""


@pytest.fixture(autouse=True)
def poisoned_empty() -> None:
    """Leave torch.empty as readers have it: a program for libtwofour holds every call, the poison's too."""


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yield each block of Python and the line above its first."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start(1)), found[1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in SLOW)) for n in GIVEN])
def test_the_blocks_of_a_page_run(
    name: str, tmp_path: Path, times_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))
    monkeypatch.setattr(ASP, "_session", None)  # one model in a process, which other tests would meet
    page, scope = ROOT / "docs" / f"{name}.md", dict[str, Any]()
    exec(START, scope)
    count = 0
    for count, (line, block) in enumerate(blocks(page), 1):
        exec(GIVEN[name].get(count - 1, ""), scope)
        program = "\n" * line + DOTS.sub("loop()", block)  # so that a failure names the page's line
        exec(compile(program, str(page), "exec"), scope)
    assert count > max(GIVEN[name], default=0), "something is given to a block that is not there"


def test_every_page_with_python_is_run_by_a_test() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.md")]
    with_python = {page.stem for page in pages if any(blocks(page))}
    assert with_python == GIVEN.keys() | ELSEWHERE.keys() and not GIVEN.keys() & ELSEWHERE.keys()
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(), f"{test} does not run {name}.md"


def test_code_that_looks_like_python_says_so() -> None:
    """A block without a language is no Python: it would run nowhere."""
    for page in (ROOT / "docs").glob("*.md"):
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.M | re.S):
            assert not re.match(r"(from [\w.]+ import|import) ", block), f"{page.name}: {block[:60]}"

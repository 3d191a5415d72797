"""Tables of embeddings in fewer bits: what they answer, what the plan says, and that files hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.graph.small import Encoder
from tests.turns import in_turn
from twofour.compiler import CompiledLinear, against_dense
from twofour.compiler.embeddings import CompiledEmbedding
from twofour.errors import CompileError
from twofour.packing import Packed

pytestmark = pytest.mark.usefixtures("panels_first")

IDS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
EXAMPLE = IDS, torch.ones(2, 16)


class Tied(nn.Module):
    """A table, a layer, a head that is the table, and a table of another class."""

    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, 64), Tied.Scaled(50, 64)
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.words(ids) + self.places(ids)))


def tables(model: nn.Module) -> list[CompiledEmbedding]:
    return [module for module in model.modules() if isinstance(module, CompiledEmbedding)]


@in_turn(("kind", "dtype"), [("bfloat16", "int8"), ("int8", "float32")])
def test_tables_take_fewer_bytes_in_memory_and_in_files(kind: str, dtype: str, tmp_path_factory: Any) -> None:
    assert_fewer_bytes(kind, dtype, tmp_path_factory)


@pytest.mark.long
@in_turn(("kind", "dtype"), [("bfloat16", "float32"), ("int8", "int8")])
def test_tables_of_the_other_types_take_fewer_bytes_too(kind: str, dtype: str, tmp_path_factory: Any) -> None:
    assert_fewer_bytes(kind, dtype, tmp_path_factory)


def assert_fewer_bytes(kind: str, dtype: str, tmp_path_factory: Any) -> None:
    model = Encoder().eval()
    before = copy.deepcopy(model.state_dict())
    fast = quick(model, EXAMPLE, dtype=dtype, embeddings=kind)
    (table, *_), own = tables(fast), [m for m in model.modules() if isinstance(m, nn.Embedding)]
    assert len(tables(fast)) == len(own)
    assert table.rows.dtype is {"bfloat16": torch.bfloat16, "int8": torch.int8}[kind]
    (said,) = (note for note in fast.plan.notes if note.startswith(f"embeddings in {kind}"))
    assert "of a table's norm; " in said
    if dtype == "float32":
        assert "they alone move the answer on the example by" in said and said.endswith(" of its norm")
    else:  # where the layers' own roundings move it as much
        assert said.endswith(f"; the error on the example counts them and the layers' {dtype} together")
    assert fast.plan.embeddings == kind and fast.plan.error < 0.2
    found, want = table(IDS), own[0](IDS)
    assert found.dtype is torch.float32 and (found - want).norm() < 2e-2 * want.norm()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    path: Path = tmp_path_factory.mktemp("tables") / "model.safetensors"
    twofour.save(fast, path)
    held = twofour.export.read(path)
    stored = {**held.plain, **held.packed}[next(n for n, m in model.named_modules() if m is own[0]) + ".weight"]
    assert isinstance(stored, Packed) is (kind == "int8") and stored.nbytes < own[0].weight.nbytes / 1.9
    loaded = twofour.load(path, model)
    with torch.inference_mode():
        assert torch.equal(loaded(*EXAMPLE), fast(*EXAMPLE))
        other = copy.deepcopy(fast)
        assert torch.equal(other(*EXAMPLE), fast(*EXAMPLE))
    assert loaded.plan.embeddings == kind and len(tables(loaded)) == len(own)


def test_the_plan_says_what_a_tied_head_takes_beside_its_table() -> None:
    fast = quick(Tied().eval(), IDS)
    told = [note for note in fast.plan.notes if note.startswith("`head` is tied to the table `words`")]
    assert bool(told) is isinstance(fast.head, CompiledLinear)  # one that stays torch's own reads the table


def test_a_tied_head_keeps_its_weight_and_tables_of_other_classes_stay() -> None:
    model = Tied().eval()
    fast = quick(model, IDS, embeddings="int8")
    assert isinstance(fast.words, CompiledEmbedding) and "reads it too" not in str(fast.plan)
    assert "`head` is tied to the table `words` and keeps a weight of its own" in str(fast.plan)
    assert type(fast.places) is Tied.Scaled and "Scaled may look its rows up" in str(fast.plan)
    assert fast.words.weight.shape == (50, 64) and fast.words.weight.dtype is torch.float32
    with torch.inference_mode():
        assert (fast(IDS) - model(IDS)).norm() < 3e-2 * model(IDS).norm()


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(CompileError, match=r"(?s)type of embeddings.*'int4'.*\"bfloat16\" or \"int8\""):
        quick(Tied().eval(), IDS, embeddings="int4")
    with pytest.raises(CompileError, match=r'embeddings="int8" needs an embedding'):
        quick(nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(2, 64), embeddings="int8")
    assert quick(Tied().eval(), IDS, embeddings=torch.bfloat16).plan.embeddings == "bfloat16"
    renormed = nn.Sequential(nn.Embedding(50, 64, max_norm=1.0), nn.Linear(64, 64)).eval()
    fast = quick(renormed, IDS, embeddings="int8")
    assert "max_norm changes its rows" in str(fast.plan) and type(fast[0]) is nn.Embedding


@in_turn("kind", ("bfloat16", "int8"))
def test_a_table_of_a_head_that_has_no_weight_of_its_own_stays_in_files_too(kind: str, tmp_path_factory: Any) -> None:
    model, path = Tied().eval(), tmp_path_factory.mktemp("tables") / "model.safetensors"
    model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    fast = quick(model, IDS, embeddings=kind)
    twofour.save(fast, path)
    for one in (fast, twofour.load(path, Tied().eval()), twofour.load(path, model)):
        assert type(one.words) is nn.Embedding and "`head` reads it too" in str(one.plan)
        assert torch.equal(one.words.weight, model.words.weight)


HOOKED = "it has hooks, which a replacement would lose"
LAID_OVER: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "hook": (lambda table: table.register_forward_hook(lambda module, inputs, output: 2 * output), HOOKED),
    "hook before": (
        lambda table: table.register_forward_pre_hook(lambda module, inputs: ((inputs[0] + 1) % 50,)),
        HOOKED,
    ),
    "forward": (
        lambda table: setattr(table, "forward", lambda ids: 3 * nn.functional.embedding(ids, table.weight)),
        "its forward was replaced on the instance",
    ),
}


@in_turn("case", LAID_OVER)
def test_hooks_and_a_forward_of_its_own_keep_a_table_as_they_keep_a_layer(case: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64)).eval()
    lay, reason = LAID_OVER[case]
    lay(model[0])
    fast = quick(model, IDS, embeddings="int8")
    assert type(fast[0]) is nn.Embedding and f"`0` stays: {reason}" in str(fast.plan)
    with torch.inference_mode():
        assert (fast(IDS) - model(IDS)).norm() < 1e-5 * model(IDS).norm()


def _no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_dense, "milliseconds", lambda calls: {"dense": 1.0, "compiled": 2.0})


def test_a_head_that_is_dense_again_has_the_table_or_says_that_it_has_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _no_faster(monkeypatch)
    model = Tied().eval()
    fast = quick(model, IDS)
    twofour.save(fast, tmp_path / "model.safetensors")
    for one in (fast, twofour.load(tmp_path / "model.safetensors", model)):
        assert type(one.head) is nn.Linear and one.head.weight is one.words.weight
        assert one.head.weight is not model.head.weight
        with torch.inference_mode():
            assert torch.equal(one(IDS), model(IDS))
    fast = quick(model, IDS, embeddings="int8")
    assert type(fast.head) is nn.Linear and isinstance(fast.words, CompiledEmbedding)
    assert "`head` is tied to the table `words` and keeps a weight of its own: 0.01 MB" in fast.plan.notes


def _gpt2(layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_positions=64, n_embd=64, n_layer=layers, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(96, (1, 9))}


def _t5() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    ids = torch.randint(1, 96, (1, 9))
    return T5ForConditionalGeneration(config).eval(), {"input_ids": ids, "decoder_input_ids": ids[:, :3]}


def _said(model: nn.Module) -> tuple[Any, ...]:
    """Return what a plan decided, without times and what a file cannot know: how far rows are off."""
    notes = [note.partition(", off by up to")[0] for note in model.plan.notes if "table" in note]
    return model.plan.embeddings, notes, [(layer.name, layer.kernel, layer.bytes_after) for layer in model.plan.layers]


@pytest.mark.usefixtures("no_measuring")
@in_turn(
    ("family", "kind", "slow"),
    [(_gpt2, "int8", True), (_gpt2, "bfloat16", False), (_t5, "int8", False), (_t5, "bfloat16", True)],
)
def test_tables_tied_to_a_head_come_back_from_a_file(
    family: Callable[[], tuple[nn.Module, dict[str, Tensor]]], kind: str, slow: bool, tmp_path_factory: Any
) -> None:
    model, example = family()
    with pytest.MonkeyPatch.context() as patched:
        if slow:
            _no_faster(patched)
        fast = quick(model, example, embeddings=kind, graph=False)
    assert type(fast.lm_head) is nn.Linear or not slow
    assert len(tables(fast)) == sum(isinstance(module, nn.Embedding) for module in model.modules())
    path = tmp_path_factory.mktemp("tables") / "model.safetensors"
    twofour.save(fast, path)
    loaded = twofour.load(path, family()[0], graph=False)
    assert _said(loaded) == _said(fast) and len(tables(loaded)) == len(tables(fast))
    with torch.inference_mode():
        assert torch.equal(loaded(**example).logits, fast(**example).logits)


def test_generate_with_a_tied_head() -> None:
    model, example = _gpt2(1)
    ids = example["input_ids"]
    fast = quick(model, example, embeddings="int8")
    assert len(tables(fast)) == 2
    with torch.inference_mode():
        answer = fast.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        logits, want = (one(ids, use_cache=False).logits for one in (fast, model))
    assert answer.shape == (1, 15) and (logits - want).norm() < 3e-2 * want.norm()

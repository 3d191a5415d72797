"""Tables that a head is tied to: kept once in memory and in files, with the answers that the model gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from tests.compiler.small import quick
from tests.turns import in_turn
from twofour.compiler import CompiledLinear, choose, head_tables
from twofour.compiler.head_tables import HeadEmbedding
from twofour.graph.executor.recorder import tensors_in
from twofour.kernels import Kernel

WORDS = 4400
"""Rows of 64 numbers that are more than `LEAST_SHARED`."""

Made = tuple[nn.Module, dict[str, Tensor], str, str]


pytestmark = pytest.mark.usefixtures("panels_first")


def _gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=1, n_head=4, **ends)
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(WORDS, (1, 9))}, "transformer.wte", "lm_head"


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None)
    ids = torch.randint(WORDS, (1, 9))
    return LlamaForCausalLM(config).eval(), {"input_ids": ids}, "model.embed_tokens", "lm_head"


def _t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    ids = torch.randint(1, WORDS, (1, 9))
    example = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    return T5ForConditionalGeneration(config).eval(), example, "shared", "lm_head"


def _bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    ids = torch.randint(WORDS, (2, 16))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4)).eval()
    return model, example, "bert.embeddings.word_embeddings", "cls.predictions.decoder"


def table_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors that are as large as the table in one byte a number, each memory once."""
    every = (one for one in tensors_in(model) if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided)
    found = {one.untyped_storage().data_ptr(): one for one in every}
    return sum(one.untyped_storage().nbytes() for one in found.values() if one.numel() >= WORDS * 64)


def logits(model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        return model(**example).logits


@in_turn(("family", "dtype", "kind"), [(_gpt2, "float32", None), (_t5, "float32", None), (_llama, "int8", "int8")])
def test_a_table_is_kept_once_in_memory_and_in_files(
    family: Callable[[], Made], dtype: str, kind: str | None, tmp_path_factory: Any
) -> None:
    assert_kept_once(family, dtype, kind, tmp_path_factory.mktemp("tables") / "model.safetensors")


@pytest.mark.long
@in_turn(
    ("family", "dtype", "kind"), [(_llama, "float32", None), (_bert, "float32", None), (_gpt2, "bfloat16", "bfloat16")]
)
def test_tables_of_other_families_and_types_are_kept_once(
    family: Callable[[], Made], dtype: str, kind: str | None, tmp_path_factory: Any
) -> None:
    assert_kept_once(family, dtype, kind, tmp_path_factory.mktemp("tables") / "model.safetensors")


def assert_kept_once(family: Callable[[], Made], dtype: str, kind: str | None, path: Path) -> None:
    model, example, table, head = family()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(head_tables, "LEAST_SHARED", 1 << 62)
        twice = quick(model, example, dtype=dtype, embeddings=kind)
    fast = quick(model, example, dtype=dtype, embeddings=kind)
    layer = fast.get_submodule(head)
    assert isinstance(layer, CompiledLinear) and isinstance(fast.get_submodule(table), HeadEmbedding)
    assert [note for note in fast.plan.notes if "are tied and kept once" in note and f"`{head}`" in note]
    assert not [note for note in fast.plan.notes if f"`{head}` is tied to the table" in note]
    assert table_bytes(fast) < 1.05 * layer.prepared.nbytes < 0.7 * table_bytes(twice)
    assert torch.equal(logits(fast, example), logits(twice, example))
    same_answers(fast, twice, example)

    twofour.save(fast, path)
    held = twofour.export.read(path)
    aliases = {*held.aliases.items(), *((b, a) for a, b in held.aliases.items())}
    assert (f"{head}.weight", f"{table}.weight") in aliases or f"{head}.weight" in held.aliases
    loaded = twofour.load(path, family()[0])
    assert isinstance(loaded.get_submodule(table), HeadEmbedding) and table_bytes(loaded) == table_bytes(fast)
    assert torch.equal(logits(loaded, example), logits(fast, example))
    same_answers(loaded, fast, example)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(logits(other, example), logits(fast, example))


def same_answers(one: nn.Module, other: nn.Module, example: dict[str, Tensor]) -> None:
    """Compare tokens that models generate, where they do."""
    if not one.can_generate():
        return
    ids, options = example["input_ids"], {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        assert torch.equal(one.generate(ids, **options), other.generate(ids, **options))


class Tied(nn.Module):
    """A table and a head that is the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.body, self.head = nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Linear(64, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.words(ids)))


IDS = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(0))


def test_layer_by_layer_and_followed_by_torch_rows_are_the_tables() -> None:
    model = Tied().eval()
    fast = quick(model, IDS, graph=False)
    assert isinstance(fast.words, HeadEmbedding) and "4400, 64, rows of dense_panels" in str(fast)
    assert fast.words.num_embeddings == WORDS and fast.words.weight.shape == (WORDS, 64)
    with torch.inference_mode():
        for ids in (IDS, IDS.int(), IDS.t(), IDS[:, :0], IDS[0, 0]):
            assert torch.equal(fast.words(ids), model.words(ids))
        assert torch.equal(fast.words.weight, model.words.weight)
        for wrong in (-1, WORDS):
            with pytest.raises(IndexError, match="index out of range in self"):
                fast.words(torch.tensor([0, wrong]))
    with torch.no_grad():
        exported = torch.export.export(fast.words, (IDS,)).module()
        assert torch.equal(exported(IDS + 1), model.words(IDS + 1))


UNKNOWN = tuple(torch.zeros(2, 8, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16))
"""Numbers of rows in types that no embedding takes."""


@in_turn("graph", (False, True))
@in_turn("kind", (None, "int8"))
def test_ids_of_types_that_no_embedding_takes_are_the_models_own_error(kind: str | None, graph: bool) -> None:
    model = Tied().eval()
    fast = quick(model, IDS, graph=graph, dtype=kind or "float32", embeddings=kind)
    assert isinstance(fast.words, HeadEmbedding)
    with torch.inference_mode():
        for ids in (*UNKNOWN, UNKNOWN[0] + 1.5, UNKNOWN[0][:, :0]):
            with pytest.raises(RuntimeError, match=r"argument #1 .indices. to have one of .* Long, Int") as own:
                model.words(ids)
            for call in (fast, fast.words):
                with pytest.raises(RuntimeError) as found:
                    call(ids)
                assert str(found.value) == str(own.value)


def test_a_call_that_names_no_row_is_the_models_own_error_in_a_graph_too() -> None:
    fast = quick(Tied().eval(), IDS, graph=True)
    with torch.inference_mode(), pytest.raises(IndexError, match="index out of range in self"):
        fast(torch.full_like(IDS, WORDS))


def _hook(model: Tied) -> None:
    model.words.register_forward_hook(lambda module, inputs, output: 2 * output)


def _other_reader(model: Tied) -> None:
    model.other = nn.ParameterList([model.words.weight])


def _small(model: Tied) -> None:
    model.words = nn.Embedding(100, 64)
    model.head = nn.Linear(64, 100, bias=False)
    model.head.weight = model.words.weight


@in_turn("change", (_hook, _other_reader, _small))
def test_tables_that_others_need_stay_beside_the_heads_weight(change: Callable[[Tied], None]) -> None:
    model = Tied().eval()
    change(model)
    fast = quick(model, IDS % 100)
    assert type(fast.words) is nn.Embedding and isinstance(fast.head, CompiledLinear)
    assert "`head` is tied to the table `words` and keeps a weight of its own" in str(fast.plan)
    with torch.inference_mode():
        assert (fast(IDS % 100) - model(IDS % 100)).norm() < 1e-5 * model(IDS % 100).norm()


def test_kernels_in_an_order_of_a_librarys_own_return_no_rows() -> None:
    assert not any(kernel.looks_up for kernel in (choose.find("dense_matmul_f32_prepacked__onednn"),))
    assert not Kernel.looks_up

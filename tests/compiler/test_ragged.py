"""Batches with padding run on their real tokens: the same answers there, zeros at padding, and why not where not."""

import copy
import pickle
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import twofour
from tests.compiler.small import quick
from twofour import calls
from twofour.compiler import ragged
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.ragged import RaggedProgram, room_for
from twofour.compiler.timed import held_by_model, held_by_program
from twofour.compiler.whole_model import WholeModel
from twofour.graph.ragged import BY_TOKEN, _Body
from twofour.kernels.rotation import rotation

transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
pytestmark = pytest.mark.usefixtures("no_measuring")

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
LENGTHS = (5, 12, 1, 7)


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(length))


def padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """A batch of sequences of these lengths, padded behind."""
    length = max(lengths)
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids(len(lengths), length), "attention_mask": mask}


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**{**SIZES, "vocab_size": 100, **options})).eval()


def compiled(model: nn.Module, **options: Any) -> Any:
    given = {"input_ids": ids(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    return quick(model, given, graph=True, **options)


@cache
def dense() -> tuple[nn.Module, Any]:
    """A model, and what it is compiled to: once for the tests that only call it."""
    return (model := bert()), compiled(model)


def packs(fast: Any, given: dict[str, Tensor]) -> bool:
    """Tell whether a call runs on packed tokens."""
    runner = fast.forward
    assert isinstance(runner, WholeModel)
    leaves = runner.guard.leaves({name: given[name] for name in runner.guard.inputs.value([None] * len(given))})
    assert leaves is not None
    return runner.ragged is not None and runner.ragged.leaves(leaves) is not None


@torch.inference_mode()
def same(model: nn.Module, fast: Any, given: dict[str, Tensor], **tolerances: float) -> None:
    """Hold a call against the model: at real tokens, and zeros at padding."""
    real = given["attention_mask"] == 1
    got, want = fast(**given), model(**given)
    assert type(got) is type(want)
    close: dict[str, Any] = {"atol": 3e-5, "rtol": 1e-4, **tolerances}
    torch.testing.assert_close(got[0][real], want[0][real], **close)
    assert not got[0][~real].any()
    if getattr(got, "pooler_output", None) is not None:
        torch.testing.assert_close(got.pooler_output, want.pooler_output, **close)


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.long)])
def test_bert(sparse: bool) -> None:
    model, fast = dense()
    if sparse:
        fast = compiled(model := twofour.prune(bert(), "2:4"))
    assert "run on their real tokens, " in fast.plan.account.ragged and "ragged: " in str(fast.plan)
    assert re.search(r"\(of \d+ sequences \d+ of \d+ tokens take \d\.\d\dx the time of all", fast.plan.account.ragged)
    for given in (padded(), padded((9, 3)), padded((1, 40, 2))):
        assert packs(fast, given)
        same(model, fast, given)
    holes = padded((12, 12, 12))
    holes["attention_mask"][:, 2:9:3] = 0
    same(model, fast, holes)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_types_that_round(dtype: str) -> None:
    model = bert()
    fast = compiled(model, dtype=dtype)
    assert packs(fast, padded())
    same(model, fast, padded(), atol=0.1, rtol=0.1)


@pytest.mark.long
def test_int8_of_static_ranges() -> None:
    model = twofour.prune(bert(), "2:4")
    data = [{"input_ids": ids(4, 16), "attention_mask": torch.ones(4, 16, dtype=torch.long)}]
    fast = compiled(model, dtype="int8", data=data)
    assert fast.plan.account.rewrites["activations between layers in bytes"] and packs(fast, padded())
    same(model, fast, padded(), atol=0.1, rtol=0.1)


def test_what_runs_padded_answers_as_before() -> None:
    model, fast = dense()
    full, begins = padded((12, 12)), padded((12, 12))
    begins["attention_mask"][0, :3] = 0
    for given in (full, begins, {**full, "attention_mask": 2 * full["attention_mask"]}, padded((12, 11))):
        assert not packs(fast, given)
        with torch.inference_mode():
            torch.testing.assert_close(fast(**given)[0], model(**given)[0], atol=3e-5, rtol=1e-4)
    with calls.without_fast_paths(), torch.inference_mode():
        assert not packs(fast, padded())
        torch.testing.assert_close(fast(**padded())[0], model(**padded())[0], atol=3e-5, rtol=1e-4)


def test_packing_does_not_hang_on_torchs_switch() -> None:
    """Other code may turn torch's own fast paths off for good; a compiled encoder stays as fast as its plan says."""
    _, fast = dense()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert packs(fast, padded())
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_model_whose_call_is_long_is_tried_on_two_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = dense()
    assert re.search(r"of 4 sequences \d+ of 64 tokens", fast.plan.account.ragged)
    monkeypatch.setattr(ragged, "LONG_CALL", 0.0)
    assert re.search(r"of 2 sequences \d+ of 32 tokens", compiled(bert()).plan.account.ragged)


def test_one_slow_call_does_not_make_a_model_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes memory, and a busy machine stops for others: one such call decided."""
    times = iter([0.0, 1.0, 1.0, 1.01])
    monkeypatch.setattr(ragged, "clock", lambda: "wall")
    monkeypatch.setattr(ragged, "time", SimpleNamespace(perf_counter=lambda: next(times), thread_time=None))
    program: Any = list  # any call without arguments
    assert not ragged._is_long(program, ())


@pytest.mark.long
def test_an_example_with_padding_is_compared_as_a_whole() -> None:
    model = bert()
    fast: Any = quick(model, padded(), graph=True)
    assert fast.plan.account.engine == "graph" and fast.plan.error < 1e-4 and packs(fast, padded())
    same(model, fast, padded())


@pytest.mark.long
def test_positions_made_of_the_ids_and_a_head() -> None:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SIZES, vocab_size=100, pad_token_id=1, num_labels=3)
    model = transformers.RobertaForSequenceClassification(config).eval()
    fast = compiled(model)
    given = padded()
    given["input_ids"][given["attention_mask"] == 0] = 1
    assert packs(fast, given)
    with torch.inference_mode():
        torch.testing.assert_close(fast(**given).logits, model(**given).logits, atol=3e-5, rtol=1e-4)


@pytest.mark.long
def test_rotary_positions_and_gates_of_real_tokens() -> None:
    """ModernBERT whose layers all see whole sequences: each token is turned by its own place."""
    torch.manual_seed(0)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0) | {"eos_token_id": 1, "sep_token_id": 1}
    config = transformers.ModernBertConfig(**SIZES, **tokens, vocab_size=100, global_attn_every_n_layers=1)
    fast = compiled(model := transformers.ModernBertModel(config).eval())
    rewrites = fast.plan.account.rewrites
    assert rewrites["heads turned by positions"] == rewrites["gates of one product"] == 2
    for given in (padded(), padded((9, 3)), padded((1, 40, 2))):
        assert packs(fast, given)
        same(model, fast, given)


@pytest.mark.parametrize("own", [False, True])
def test_a_rotation_by_factors_of_its_own_tokens_stays_padded(own: bool) -> None:
    """Of factors that a product makes of the tokens a row was taken of each packed row, as if they were padded."""
    layer = nn.Linear(8, 8)
    setattr(layer, BY_TOKEN, True)
    graph = fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder("factor")
    product = graph.call_module("layer", (x,))
    turned = graph.call_function(rotation, (product, factor, product if own else factor))
    for node in (x, factor, product, turned):
        node.meta["val"] = torch.zeros(2, 5, 8)
    body = _Body(fx.GraphModule({"layer": layer}, graph), (2, 5))
    assert (turned in body.nodes) is not own


def test_a_decoder_that_reads_whole_batches() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=100, use_cache=False)
    model = transformers.LlamaForCausalLM(config).eval()
    fast = compiled(model)
    assert "ragged" in fast.plan.account.to_dict()
    given = padded()
    real = given["attention_mask"] == 1
    with torch.inference_mode():
        torch.testing.assert_close(fast(**given).logits[real], model(**given).logits[real], atol=3e-5, rtol=1e-4)


class Pooled(nn.Module):
    """The mean of what an encoder answers: of real tokens, or of all places."""

    def __init__(self, of_real: bool) -> None:
        super().__init__()
        self.encoder, self.of_real = bert(), of_real

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        if not self.of_real:
            return found.mean(1)
        real = attention_mask[..., None].to(found.dtype)
        return (found * real).sum(1) / real.sum(1).clamp(min=1e-9)


@pytest.mark.long
def test_a_mean_of_real_tokens_is_the_same_and_one_of_all_places_runs_padded() -> None:
    model = Pooled(True).eval()
    fast = compiled(model)
    assert packs(fast, padded())
    with torch.inference_mode():
        torch.testing.assert_close(fast(**padded()), model(**padded()), atol=3e-5, rtol=1e-4)
        fast = compiled(model := Pooled(False).eval())
        assert "its answer depends on padding" in fast.plan.account.ragged and not packs(fast, padded())
        torch.testing.assert_close(fast(**padded()), model(**padded()), atol=3e-5, rtol=1e-4)


class Greatest(nn.Module):
    """The greatest score of any place, padding included; on an example it happens to be a real one's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.score = bert(), nn.Linear(64, 1)
        nn.init.constant_(self.score.bias, 20.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        return (self.score(found) + 0.1 * torch.arange(-found.shape[1], 0, device="cpu")[:, None].abs()).amax(1)


def test_a_maximum_over_padding_runs_padded() -> None:
    fast = compiled(Greatest().eval())
    assert "depends on what stands at padding" in fast.plan.account.ragged and not packs(fast, padded())


class Biased(nn.Module):
    """Attention whose mask has more in it than padding, or is made of other inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.into, self.out, self.words = nn.Linear(32, 96), nn.Linear(32, 32), nn.Embedding(100, 32)
        self.far, self.kind = nn.Parameter(torch.randn(64)), kind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        parts = self.into(self.words(input_ids)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts)
        mask = (1 - attention_mask[:, None, None].float()) * -1e9
        if self.kind == "far":
            mask = mask + self.far[: input_ids.shape[1]]
        elif self.kind == "ids":
            mask = mask + (input_ids[:, None, None] == 1).float() * -1e9
        elif self.kind == "window":
            places = torch.arange(input_ids.shape[1], dtype=torch.int64, device="cpu")
            mask = mask + ((places[:, None] - places).abs() > 32).float() * -1e9
        elif self.kind == "early":
            mask = mask * 1e-9
        found = nn.functional.scaled_dot_product_attention(q, k, v, None if self.kind == "none" else mask)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("far", "hides something else than padding"),
        ("window", "hides something else than padding"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("", "run on their real tokens"),
                ("early", "hides something else than padding"),
                ("ids", "is made of `input_ids`, `attention_mask`"),
                ("none", ""),
            )
        ),
    ],
)
def test_masks_that_hide_more_than_padding_keep_the_padded_graph(kind: str, why: str) -> None:
    torch.manual_seed(0)
    model = Biased(kind).eval()
    fast = compiled(model)
    said = fast.plan.account.ragged
    assert why in said and bool(why) is bool(said), said
    with torch.inference_mode():
        got, want, real = fast(**padded()), model(**padded()), padded()["attention_mask"] == 1
    torch.testing.assert_close(got[real], want[real], atol=3e-5, rtol=1e-4)


@pytest.mark.long
def test_slower_packed_batches_run_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "_raced", lambda *_: ({"padded": 1.0, "packed": 2.0}, 0.0))
    fast = compiled(bert())
    assert "run padded, which is faster" in fast.plan.account.ragged and not packs(fast, padded())


@pytest.mark.long
def test_copies_and_files(tmp_path: Path) -> None:
    model = bert()
    fast = compiled(model)
    for one in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert packs(one, padded())
        same(model, one, padded())
    twofour.save(fast, tmp_path / "model.safetensors")
    loaded: Any = twofour.load(tmp_path / "model.safetensors", bert())
    assert packs(loaded, padded())
    same(model, loaded, padded())


def test_batches_of_many_sizes_share_a_few_programs() -> None:
    rooms = {room_for(tokens) for tokens in range(1, 4097)}
    assert len(rooms) < 120
    assert all(tokens <= room_for(tokens) <= max(tokens + 7, tokens * 17 / 16) for tokens in range(1, 4097))


def test_a_program_takes_a_batch_by_its_mask_alone() -> None:
    program = dense()[1].forward.ragged
    assert isinstance(program, RaggedProgram)
    leaves = [padded()[name] for name in ("input_ids", "attention_mask")]
    more = program.leaves(leaves)
    assert more is not None and len(more) == 5 and more[2].shape == (room_for(sum(LENGTHS)),)


def test_times_are_of_the_widths_and_the_kernels_inside_of_calls() -> None:
    """Programs of one text are not of one time: what they call has sizes, and kernels inside of it."""
    models = [compiled(twofour.prune(bert(intermediate_size=width), "2:4")) for width in (128, 192)]
    programs = [fast.forward.ragged.program.python for fast in models]
    assert programs[0].text == programs[1].text
    held, other = map(held_by_program, programs)
    assert held != other and held_by_model(models[0]) != held_by_model(models[1])
    inside = [one.__self__ for one in programs[0].names.values() if hasattr(one, "__self__")]
    bound = [one for one in inside if isinstance(one, CompiledLinear)]
    assert len(bound) < len([entry for entry in held if "matmul" in entry]), "some stand inside of others"

import copy
import io
import logging
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from twofour import native
from twofour.compiler import CompiledLinear, Plan, choose
from twofour.compiler.layouts import WORTH_A_COPY
from twofour.errors import CompileError, KernelError, LayerError, PatternError
from twofour.kernels.dispatch import DispatchTable


def test_a_compiled_model_computes_what_the_masked_model_does() -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    before = copy.deepcopy(model.state_dict())
    example = torch.randn(7, 64)
    fast = quick(model, example)
    with torch.inference_mode():
        for shape in ((1, 64), (7, 64), (130, 64), (2, 3, 64), (0, 64)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
    assert isinstance(fast.plan, Plan)
    assert fast.plan.error is not None and fast.plan.error < 1e-5
    assert [layer.name for layer in fast.plan.layers] == ["0", "2", "3"]
    assert type(fast) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "compile must leave the model as it was"


def test_the_plan_says_what_runs_and_why() -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), torch.randn(7, 64))
    by_name = {layer.name: layer for layer in fast.plan.layers}
    assert by_name["3"].reason.startswith("dense: not 2:4")
    assert by_name["3"].sparse_ms is None
    for name in ("0", "2"):
        layer = by_name[name]
        assert layer.tokens == 7
        assert set(layer.times) == {1, 7, 32}
        fastest = min(layer.times[7].values())
        assert layer.times[7][layer.kernel] <= fastest * WORTH_A_COPY, "a slower kernel may save a copy"
    text = str(fast.plan)
    assert "why" in text and "layers run sparse" in text and "MB as kept" in text
    assert fast.plan.bytes_before == 4 * (64 * 128 + 128 * 64 + 640)


def test_memory_small_keeps_packed_weights_alone() -> None:
    model = twofour.prune(mlp(), "2:4")
    fast = quick(model, memory="small")
    for name in ("0", "2"):
        layer = fast.get_submodule(name)
        assert isinstance(layer, CompiledLinear)
        assert len(layer.prepared.tensors) == 1
        assert layer.prepared.layouts[0] in ("rows", "panels")
        # 17/32 of the dense bytes, padded to the layout's blocks, and a header of 64 bytes.
        assert layer.prepared.nbytes <= 128 * 64 * 17 // 8 + 64
    assert fast.plan.bytes_after < fast.plan.bytes_before
    x = torch.randn(5, 64)
    torch.testing.assert_close(fast(x), model(x).detach(), atol=1e-5, rtol=1e-5)


def test_every_level_compiles(every_isa: str) -> None:
    model = twofour.prune(mlp(), "2:4")
    fast = quick(model, torch.randn(3, 64), memory="small")
    level = native.instruction_sets()[every_isa].level
    assert fast.plan.isa == native.isa_text() and fast.plan.isa.split()[0] == level
    for name in ("0", "2"):
        for kernel in fast.get_submodule(name).dispatch.kernels:
            assert kernel.isa == "any" or native.supports(kernel.isa)


def test_torch_compile_around_it() -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    fast = quick(model, torch.randn(4, 64))
    torch._dynamo.reset()
    outer = torch.compile(fast, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (4, 9, 40):
            x = torch.randn(tokens, 64)
            torch.testing.assert_close(outer(x), model(x), atol=1e-5, rtol=1e-5)


def test_torch_export_of_it() -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    fast = quick(model, torch.randn(4, 64), memory="small")
    program = torch.export.export(fast, (torch.randn(4, 64),), dynamic_shapes=({0: torch.export.Dim("tokens", min=2)},))
    x = torch.randn(11, 64)
    torch.testing.assert_close(program.module()(x), model(x).detach(), atol=1e-5, rtol=1e-5)


def test_copies_and_pickles() -> None:
    model = twofour.prune(mlp(), "2:4").eval()
    fast = quick(model, torch.randn(4, 64))
    x = torch.randn(5, 64)
    want = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), want)
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    torch.testing.assert_close(torch.load(stream, weights_only=False)(x), want)


def test_transformer_encoder_layers_use_the_compiled_linears() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = twofour.prune(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "2:4").eval()
    x = torch.randn(2, 5, 64)
    fast = quick(model, x, memory="small", graph=False)
    seen: list[str] = []
    for name, module in fast.named_modules():
        if isinstance(module, CompiledLinear):
            module.register_forward_pre_hook(lambda _, __, name=name: seen.append(name))
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert len(seen) == 4
    reasons = {entry.name: entry.reason for entry in fast.plan.layers}
    assert "MultiheadAttention" in reasons["layers.0.self_attn.out_proj"]


def test_tied_layers_share_one_prepared_weight() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    twofour.prune(model, "2:4")
    fast = quick(model, torch.randn(3, 64), memory="small")
    assert fast[0].prepared is fast[2].prepared


def test_layers_that_cannot_be_replaced_stay_and_say_why() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model = nn.Sequential(Own(64, 64), hooked, parametrised, nn.Linear(64, 64).double(), nn.Linear(66, 8))
    model[3].forward = lambda x: x  # type: ignore[method-assign]
    fast = quick(model)
    reasons = {layer.name: layer.reason for layer in fast.plan.layers}
    assert "forward of its own" in reasons["0"]
    assert "hooks" in reasons["1"]
    assert "forward was replaced on the instance" in reasons["3"]
    assert "66 is not a multiple of 4" in reasons["4"]
    assert type(fast[0]) is Own


def test_a_root_linear_and_dict_examples() -> None:
    torch.manual_seed(0)
    root = twofour.prune(nn.Linear(64, 64), "2:4")
    x = torch.randn(3, 64)
    torch.testing.assert_close(quick(root, x)(x), root(x).detach(), atol=1e-5, rtol=1e-5)

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, *, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.fc(first) + second}

    model = twofour.prune(Keyed(), "2:4")
    inputs = {"first": torch.randn(9, 64), "second": torch.randn(9, 64)}
    fast = quick(model, inputs)
    torch.testing.assert_close(fast(**inputs)["sum"], model(**inputs)["sum"].detach(), atol=1e-5, rtol=1e-5)
    assert fast.plan.layers[0].tokens == 9


def test_a_model_with_a_plan_of_its_own_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(mlp(), "2:4")
    model.plan = "mine"  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="twofour"):
        assert quick(model).plan == "mine"
    assert "layers run sparse" in caplog.text


def test_training_mode_comes_back_and_randomness_is_off() -> None:
    model = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), "2:4")
    model.train()
    model[1].eval()
    fast = quick(model, torch.randn(3, 64))
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert not fast.training and not any(p.requires_grad for p in fast.parameters())


def test_reading_the_dense_weight_is_possible_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = twofour.prune(mlp(), "2:4")
    fast = quick(model, memory="small")
    with caplog.at_level(logging.WARNING, logger="twofour"):
        assert torch.equal(fast[0].weight, model[0].weight)
    assert "layer `0`" in caplog.text


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.randn(2, 63), r"torch.float32 \(2, 63\)(.|\n)*last size is 64"),
        (torch.randn(2, 64).half(), r"torch.float16(.|\n)*try     convert the input"),
        (torch.randn(2, 64).bfloat16(), r'wanted  torch.float32 \(..., 64\)(.|\n)*x.to.*dtype="bfloat16"'),
        (torch.randn(2, 64, device="meta"), "meta(.|\n)*to the CPU"),
        (torch.randn(2, 64, requires_grad=True), "gradient"),
    ],
)
def test_inputs_that_do_not_fit_name_the_layer(x: torch.Tensor, said: str) -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), memory="small")
    with pytest.raises(KernelError, match="layer `0`") as caught:
        fast(x)
    assert re.search(said, str(caught.value))


def test_impossible_requests_are_refused() -> None:
    model = mlp()
    for options, said in (
        ({"dtype": "int4", "group": 48}, "group is not known"),
        ({"dtype": "float64"}, "dtype is not known"),
        ({"memory": "tiny"}, "memory is not known"),
    ):
        with pytest.raises(CompileError, match=said):
            quick(model, **options)
    for tokens in ((), (0,), (1.5,), ("8",)):
        with pytest.raises(CompileError, match="token counts"):
            twofour.compile(model, tokens=tokens)  # type: ignore[arg-type]
    with torch.device("meta"), pytest.raises(CompileError, match="device without kernels"):
        quick(nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight[3, 5] = float("nan")
    with pytest.raises(PatternError, match="layer `2`"):
        quick(model)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (torch.randn(3, 65), "3, 65(.|\n)*try     check its sizes"),
        (
            torch.randn(3, 64).half(),
            r"float16(.|\n)*try     convert it to the model's dtype: .*torch.float32",
        ),
        ([torch.randn(3, 65)], "try     check its sizes"),
    ],
)
def test_an_example_that_does_not_fit_names_the_layer_and_what_to_try(example: object, said: str) -> None:
    with pytest.raises(CompileError, match="layer `0`: the model does not run on the example") as caught:
        quick(mlp(), example)
    assert re.search(said, str(caught.value))


def test_options_of_int4_are_refused_elsewhere() -> None:
    for options in ({"group": 64}, {"symmetric": True}, {"dtype": "int8", "group": 32}):
        with pytest.raises(CompileError, match=r'means nothing in(.|\n)*leave (group|symmetric) out(.|\n)*"int4"'):
            quick(mlp(), **options)
    plan = quick(mlp(), dtype="int4").plan
    assert (plan.group, plan.symmetric) == (64, True)


@pytest.mark.parametrize("memory", ["small", "fast"])
def test_compiled_models_are_neither_compiled_nor_pruned_again(
    memory: str, no_measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "fast":  # torch's own layers everywhere: no layer shows that the model is compiled
        monkeypatch.setattr(
            choose, "few_layouts", lambda *_, **__: DispatchTable((), ("dense_matmul_f32_linear__torch",))
        )
    fast = quick(twofour.prune(mlp(), "2:4"), memory=memory)
    assert isinstance(fast[0], CompiledLinear) == (memory == "small")
    named = "`0`, `2`" if memory == "small" else "all layers torch's own"
    for model in (fast, copy.deepcopy(fast), nn.Sequential(fast)):
        with pytest.raises(CompileError, match="compiled already") as caught:
            quick(model)
        assert isinstance(model[0], nn.Sequential) or named in str(caught.value)
        with pytest.raises(CompileError, match="compiled already"):
            twofour.advise(model)
        with pytest.raises(LayerError, match="a compiled model cannot be pruned"):
            twofour.prune(model, "2:4")


def test_a_model_that_answers_differently_from_call_to_call_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + torch.randn(64)

    fast = quick(Noisy(), torch.randn(2, 64))
    assert "the model answers one example differently from call to call" in caplog.text
    assert "forward" not in fast.__dict__, "a graph would answer with one draw for ever"


class Counts(nn.Module):
    """Its answer follows from how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_what_a_model_counts_is_not_counted_on_by_compile() -> None:
    model, x = Counts().eval(), torch.randn(2, 64)
    fast = quick(model, x)
    assert model.calls == fast.calls == 0
    torch.testing.assert_close(fast(x), model(x).detach())
    torch.testing.assert_close(fast(x), model(x).detach())


def test_nested_tensors_of_torchs_fast_path_are_no_tokens() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 1).eval()
    x, hidden = torch.randn(2, 8, 64), torch.arange(8).expand(2, 8) >= torch.tensor([[5], [8]])
    fast = quick(twofour.prune(model, "2:4"), {"src": x, "src_key_padding_mask": hidden})
    found, want = (m(x, src_key_padding_mask=hidden).detach() for m in (fast, model))
    torch.testing.assert_close(found[~hidden], want[~hidden], atol=1e-5, rtol=1e-4)


def test_compiled_models_can_be_checked_and_show_progress() -> None:
    steps: list[tuple[int, int, str]] = []
    fast = quick(twofour.prune(mlp(), "2:4"), memory="small", progress=lambda *step: steps.append(step))
    assert steps == [(0, 3, "0"), (1, 3, "2"), (2, 3, "3")]
    report = twofour.check(fast)
    assert report.ok
    assert {finding.name for finding in report.layers} >= {"0.weight", "2.weight"}


def test_other_dtypes_are_refused_under_torch_compile_too() -> None:
    fast = quick(twofour.prune(mlp(), "2:4"), memory="small")
    for dtype in (torch.bfloat16, torch.float64):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"x of {dtype}"):
            torch.compile(fast, backend="aot_eager")(torch.randn(2, 64).to(dtype))
    layer = fast[0]
    operator = torch.ops.twofour.linear
    x, weights, text = torch.randn(2, 64), layer.prepared.tensors, layer.dispatch_text
    for wrong in (
        (x.double(), weights, layer.bias, text, 128),
        (x, weights, layer.bias.double(), text, 128),
        (x, weights, layer.bias, text, 127),
        (x, weights[:0], layer.bias, text, 128),
        (x, [weights[0][:100]], layer.bias, text, 128),
        (torch.tensor(1.0), weights, None, text, 128),
    ):
        with pytest.raises(KernelError, match="fit"):
            operator(*wrong)


def test_a_dispatch_table_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = DispatchTable((), ("nm_matmul_2x4_f32_rows__avx512",))
    monkeypatch.setenv("TWOFOUR_ISA", "scalar")
    with pytest.raises(KernelError, match="cannot run here"):
        dispatch.at(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_batch_through_a_transformer_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = twofour.prune(nn.TransformerEncoder(layer, 2), "2:4").eval()
    fast = quick(model, torch.randn(2, 5, 64), memory="small")
    x, padding = torch.randn(2, 5, 64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        want, got = model(x, src_key_padding_mask=padding), fast(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], want[~padding], atol=1e-4, rtol=1e-4)


def test_outputs_that_are_dataclasses_are_compared_and_others_said_not_to_be(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Answer:
        value: torch.Tensor

    class Wrapped(nn.Module):
        def __init__(self, as_text: bool) -> None:
            super().__init__()
            self.fc, self.as_text = nn.Linear(64, 64), as_text

        def forward(self, x: torch.Tensor) -> object:
            return str(self.fc(x).shape) if self.as_text else Answer(self.fc(x))

    x = torch.randn(2, 64)
    assert 0 < quick(twofour.prune(Wrapped(False), "2:4"), x, memory="small").plan.error < 1e-5
    with caplog.at_level(logging.WARNING, logger="twofour"):
        assert quick(twofour.prune(Wrapped(True), "2:4"), x).plan.error is None
    assert "not compared" in caplog.text


def test_recurrent_and_transposed_layers_stand_in_the_plan() -> None:
    model = nn.ModuleList([nn.LSTM(16, 16), nn.ConvTranspose1d(16, 16, 3), nn.Linear(64, 64)])
    reasons = {layer.name: layer.reason for layer in quick(model).plan.layers}
    assert "time" in reasons["0"] and "ConvTranspose1d" in reasons["1"]


def test_whole_numbers_must_be_equal() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), torch.tensor([type(self.layer) is nn.Linear] * len(x))

    with pytest.raises(CompileError, match="does not compute what the model does"):
        quick(twofour.prune(Decides(), "2:4"), torch.randn(4, 64), memory="small")


def test_a_weight_tied_both_ways_round_is_prepared_for_each() -> None:
    """Hugging Face's Conv1D has (in, out): of a square weight nothing but the axis says so."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), conv1d(64, 64)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(x)

    model, x = Tied().eval(), torch.randn(4, 64)
    fast = twofour.compile(model, x, "bfloat16", memory="small", graph=False)
    for found, want in zip(fast(x), model(x), strict=True):
        torch.testing.assert_close(found, want, atol=0.05, rtol=0.05)

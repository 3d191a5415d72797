"""Generating: seconds of `generate()` from a prompt, by the dense model in torch, by our layers and by our graphs.

Each sample generates all tokens greedily with transformers' own loop and cache; every float32 candidate must give the
tokens of the dense model that it has the weights of. torch.compile is run as transformers runs it, with a static cache.
OpenVINO and ONNX Runtime have no such loop here. They run what they would be given: one token behind a cache of the
size that all tokens need, which is written in place; the prompt, and what transformers does between two tokens, cost
them nothing. Our graphs are timed so too, beside `generate()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import twofour
from cases.columns import headed
from cases.decoder_step import DecoderStep, StepLoop, sharing, with_linears
from cases.records import machine_line
from twofour import engines, measure
from twofour.engines import OPENVINO, ORT, NotBuilt
from twofour.errors import DataError, MeasureError
from twofour.measure import Record

PROMPT, NEW = 16, 32
EAGER, INDUCTOR, LAYERS, GRAPHS = "torch eager", "torch.compile, static cache", "twofour layers", "twofour graphs"
DENSE, STEPS = "twofour dense graphs", "twofour graphs, steps alone"
OPENVINO_WEIGHTS = "OpenVINO, int8 weights"
"""As OpenVINO makes decoders in int8: no ranges of inputs, which one step cannot show."""


def gpt2(layers: int, width: int, heads: int) -> Any:
    """Return a GPT-2 of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, bos_token_id=0, eos_token_id=None))


def llama(layers: int, width: int, heads: int, key_heads: int, inner: int, vocabulary: int) -> Any:
    """Return a Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": vocabulary}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads_, bos_token_id=0, eos_token_id=None))


# Beside two layers of Llama-3-8B a head of 128,256 words has more weights than they; one of 32,000 has a fifth of all,
# and the copies of every engine fit into 16 GB.
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-6x512": lambda: gpt2(6, 512, 8),
    "gpt2-small": lambda: gpt2(12, 768, 12),
    "llama-6x512": lambda: llama(6, 512, 8, 2, 1408, 32000),
    "llama-3-8b-2-layers": lambda: llama(2, 4096, 32, 8, 14336, 128256),
    "llama-3-8b-2-layers-32k": lambda: llama(2, 4096, 32, 8, 14336, 32000),
}


def cells(models: Sequence[str], dtypes: Sequence[str], threads: Sequence[int]) -> list[dict[str, object]]:
    """List the cells.

    Raises:
        DataError: There is no such model.
    """
    if unknown := [name for name in models if name not in MODELS]:
        raise DataError(f"there is no model {unknown[0]!r}", got=",".join(models), wanted=", ".join(MODELS))
    return [
        {"case": "generate", "model": model, "dtype": dtype, "prompt": PROMPT, "new": NEW, "threads": count}
        for model in models
        for dtype in dtypes
        for count in threads
    ]


class Bench:
    """Measures cells.

    Args:
        seconds: Time box of one cell.
        inductor: Also measure torch.compile, which takes minutes to compile.
    """

    def __init__(self, seconds: float, inductor: bool = True) -> None:
        self.seconds, self.inductor = seconds, inductor

    def __call__(self, cell: dict[str, object]) -> Record:
        """Measure one cell: seconds of all new tokens, the prompt included."""
        torch.set_num_threads(threads := int(str(cell["threads"])))
        torch.manual_seed(0)
        model, dtype = MODELS[str(cell["model"])]().eval().requires_grad_(False), str(cell["dtype"])
        ids = torch.randint(1, 1000, (1, int(str(cell["prompt"]))), generator=torch.Generator().manual_seed(0))
        sparse = twofour.prune(copy.deepcopy(model), "2:4")
        new = int(str(cell["new"]))
        runs, missing = self.dense(model, ids, new, dtype, threads)
        baseline = list(runs)
        if dtype == "bfloat16":
            model, sparse = model.bfloat16(), sparse.bfloat16()
        example = {"input_ids": ids}
        ours = {DENSE: (model, "auto"), LAYERS: (sparse, False), GRAPHS: (sparse, "auto")}
        plans: dict[str, object] = {}
        for name, (source, graph) in ours.items():
            fast: Any = twofour.compile(source, example, dtype=dtype, graph=graph)
            runs[name], plans[name] = _run(fast, ids, new), list(fast.plan.notes)
        runs[STEPS] = _steps(fast, ids, new)
        if dtype == "float32":
            _same(runs, {DENSE: _run(model, ids, new), LAYERS: _run(sparse, ids, new), GRAPHS: _run(sparse, ids, new)})
        with torch.no_grad():
            return measure.compare(
                runs,
                baseline=baseline,
                seconds=self.seconds,
                threads=threads,
                clock="process" if threads == 1 else "wall",
                warmup=2,
                meta={**cell, "notes": plans, "missing": missing},
            )

    def dense(
        self, model: Any, ids: Tensor, new: int, dtype: str, threads: int
    ) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
        """Return the dense candidates of other makes in a computing type, and why others are missing."""
        made = model if dtype == "float32" else copy.deepcopy(model).bfloat16() if dtype == "bfloat16" else None
        made = engines.quantize_torch(with_linears(model), dtype) if made is None else made
        runs: dict[str, Callable[[], Tensor]] = {EAGER: _run(made, ids, new)}
        missing: dict[str, str] = {}
        if self.inductor and dtype != "int8":
            compiled = sharing(made)
            compiled.forward = torch.compile(compiled.forward)
            runs[INDUCTOR] = _run(compiled, ids, new, cache_implementation="static")
        elif self.inductor:
            missing[INDUCTOR] = "torch.compile is not built for int8: its quantisation moved to torchao"
        step = DecoderStep(with_linears(model), ids, new)
        for name, build in _runtimes(dtype).items():
            try:
                runs[name] = StepLoop(step, build, dtype, threads)
                runs[name]()
            except (ImportError, NotBuilt, RuntimeError, ValueError, TypeError) as error:
                runs.pop(name, None)
                missing[name] = f"{type(error).__name__}: {engines.reason_of(error)}"
        return runs, missing


def _runtimes(dtype: str) -> dict[str, Callable[..., Callable[[], Any]]]:
    """Return the builders of what runs a step; in int8 OpenVINO with inputs calibrated on that step, and without."""
    found: dict[str, Callable[..., Callable[[], Any]]] = {OPENVINO: engines.openvino, ORT: engines.onnxruntime}
    return found | ({OPENVINO_WEIGHTS: partial(engines.openvino, weights=True)} if dtype == "int8" else {})


def _run(model: Any, ids: Tensor, new: int, **options: Any) -> Callable[[], Tensor]:
    wanted = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    return lambda: model.generate(ids, attention_mask=mask, **wanted, **options)


def _steps(fast: Any, ids: Tensor, new: int) -> Callable[[], Tensor]:
    """Return what generates as OpenVINO and ONNX Runtime do: steps in a bare loop, behind a prompt that is there."""
    from transformers import DynamicCache

    behind = DynamicCache(config=fast.config)
    with torch.no_grad():
        answer = fast(input_ids=ids, past_key_values=behind, use_cache=True, logits_to_keep=1)
    first = answer.logits[:, -1].argmax(-1, keepdim=True)

    def run() -> Tensor:
        cache, found = copy.deepcopy(behind), [first]
        for _ in range(new - 1):
            answer = fast(input_ids=found[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(answer.logits[:, -1].argmax(-1, keepdim=True))
        return torch.cat(found, 1)

    return run


def _same(runs: dict[str, Callable[[], Tensor]], references: dict[str, Callable[[], Tensor]]) -> None:
    for name, reference in references.items():
        if not torch.equal(found := runs[name](), want := reference()):
            raise MeasureError(f"{name} generates other tokens", got=str(found.tolist()), wanted=str(want.tolist()))


def show(records: Sequence[Record], console: Console) -> None:
    """Print tokens a second, and how many times those of the best dense candidate they are."""
    table = headed(("model", "dtype", "threads", "engine", "tokens/s", "times best dense"), words=4)
    for record in records:
        for name in record.timings:
            tokens, times = rate(record, name)
            keys = (str(record.meta[key]) for key in ("model", "dtype", "threads"))
            table.add_row(*keys, name, f"{tokens:.1f}", f"{times:.2f}")
    console.print(table)
    console.print(machine_line(records[-1]), highlight=False, markup=False, soft_wrap=True)


def rate(record: Record, name: str) -> tuple[float, float]:
    """Return tokens a second, and how many times those of the best dense candidate of another make they are."""
    seconds = record.undisturbed(name)
    best = min(record.undisturbed(other) for other in record.baseline)
    return int(str(record.meta["new"])) / seconds, best / seconds

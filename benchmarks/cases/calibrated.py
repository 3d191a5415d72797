"""One-shot pruning with calibration: seconds, memory and error on a whole model, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

import twofour
from cases.memory import Peak, resident, trim
from twofour.errors import DataError, MeasureError
from twofour.measure import machine, write_json
from twofour.pruning import outcomes

MODELS = ("minilm", "llama-1b")


def run(model: str, criterion: str, pattern: str, threads: int, samples: int, path: Path) -> dict[str, object]:
    """Prune in a fresh process, write what was found to `path` and return it.

    Raises:
        DataError: The model is not known.
        MeasureError: The process failed.
    """
    if model not in MODELS:
        raise DataError("the model is not known", got=repr(model), wanted=" or ".join(MODELS))
    words = [model, criterion, pattern, str(threads), str(samples)]
    # glibc keeps freed blocks of up to 32 MB for later; told not to, the process shows what is alive.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    environment = {**os.environ, **allocator, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-m", "cases.calibrated", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        raise MeasureError("the model was not pruned", got=f"exit code {done.returncode}")
    found: dict[str, object] = {**json.loads(done.stdout.splitlines()[-1]), "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def child(model: str, criterion: str, pattern: str, threads: int, samples: int) -> dict[str, object]:
    """Build and prune the model here, watching this process's memory."""
    torch.set_num_threads(threads)
    dense, data, skip = (minilm if model == "minilm" else llama)(samples)
    trim()
    before = resident()
    start = time.perf_counter()
    with Peak() as peak:
        twofour.prune(dense, pattern, criterion=criterion, data=data, samples=samples, skip=skip)
    seconds = time.perf_counter() - start
    found = outcomes(dense)
    errors = [outcome.error for outcome in found if outcome.error is not None]
    return {
        "case": "calibrated",
        "model": model,
        "criterion": criterion,
        "pattern": pattern,
        "threads": threads,
        "samples": samples,
        "tokens": max(outcome.rows for outcome in found),
        "parameters": sum(parameter.numel() for parameter in dense.parameters()),
        "pruned": sum(mask.keep.numel() for mask in twofour.masks.of(dense).values()),
        "seconds": seconds,
        "before_bytes": before,
        "peak_bytes": peak.bytes,
        "error_mean": sum(errors) / len(errors),
        "error_largest": max(errors),
    }


def minilm(samples: int) -> tuple[nn.Module, list[dict[str, Tensor]], list[str]]:
    """all-MiniLM-L6-v2 in float32, and sequences of 128 random tokens: time and memory depend on their number alone."""
    from models import encoder

    model = encoder.minilm(1).model.encoder
    return model, _tokens(samples, 128, 30522), []


def llama(samples: int) -> tuple[nn.Module, list[dict[str, Tensor]], list[str]]:
    """The shape of TinyLlama-1.1B with random bfloat16 weights, and sequences of 256 tokens; the head stays dense."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model, _tokens(samples, 256, 32000), ["lm_head"]


def _tokens(samples: int, length: int, vocabulary: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (samples, length), generator=generator)
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(8)]


def show(found: dict[str, object], console: Console) -> None:
    """Print what was found."""
    size = {name: int(str(value)) / 2**30 for name, value in found.items() if name.endswith("_bytes")}
    console.print(
        f"{found['model']}, {found['criterion']}, {found['pattern']}, {found['threads']} threads: "
        f"{float(str(found['seconds'])):.1f} s over {found['tokens']} tokens; {int(str(found['pruned'])) / 1e6:.1f} of "
        f"{int(str(found['parameters'])) / 1e6:.1f} million parameters; {size['peak_bytes']:.2f} GiB at most, "
        f"{size['before_bytes']:.2f} before; relative error of the outputs {float(str(found['error_mean'])):.4f} on "
        f"average, {float(str(found['error_largest'])):.4f} at most",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    name, criterion, pattern, *numbers = sys.argv[1:]
    print(json.dumps(child(name, criterion, pattern, *map(int, numbers))))

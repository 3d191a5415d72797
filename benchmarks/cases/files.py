"""Files: `twofour prune` on a sharded checkpoint of 3 GB, whole and killed half-way: seconds, memory, same bytes."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from twofour.checkpoints import INDEX, Checkpoint
from twofour.errors import MeasureError
from twofour.measure import machine, write_json

HIDDEN, INNER, HEADS, VOCABULARY = 2048, 8192, 16, 32000
LAYERS = 24
"""24 layers of a Llama of 1.6 billion parameters: 3.2 GB in bfloat16."""
LAYERS_PER_FILE = 4
ALLOWED = 1_500_000_000
"""Bytes of memory that a run may take at its peak."""


def run(layers: int, path: Path) -> dict[str, object]:
    """Write the checkpoint, prune it whole, kill a second run and resume it; write what was found to `path`.

    Raises:
        MeasureError: A run failed, or the resumed result differs from the whole one.
    """
    with tempfile.TemporaryDirectory(prefix="twofour-files-") as folder:
        source, whole, resumed = (Path(folder) / name for name in ("source", "whole", "resumed"))
        write_checkpoint(source, layers)
        dense = Checkpoint.open(source)
        copy = _copied(source, Path(folder) / "copy")
        first = _finished(_start(source, whole))
        done = _killed(source, resumed, len(dense.files) // 2)
        again = _finished(_start(source, resumed))
        _require_same(whole, resumed)
        report = json.loads((whole / "report.json").read_text())
    found: dict[str, object] = {
        "case": "files",
        "layers": layers,
        "weights": len(report["layers"]),
        "files": len(dense.files),
        "dense_bytes": dense.nbytes,
        "largest_bytes": dense.largest,
        "copy_seconds": copy,
        **first,
        "files_before_kill": done,
        **{f"resumed_{name}": value for name, value in again.items()},
        "same_bytes": True,
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write the folder of a Llama with random weights in bfloat16, `LAYERS_PER_FILE` layers a file."""
    folder.mkdir(parents=True)
    values = torch.randn(VOCABULARY * HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    shapes |= {f"self_attn.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    files: list[dict[str, Tensor]] = [{"model.embed_tokens.weight": values.view(VOCABULARY, HIDDEN)}]
    places: dict[str, str] = {}
    total = 2 + -(-layers // LAYERS_PER_FILE)

    def write(part: dict[str, Tensor]) -> None:
        name = f"model-{len(set(places.values())) + 1:05}-of-{total:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, name))

    write(files.pop())
    for first in range(0, layers, LAYERS_PER_FILE):
        part: dict[str, Tensor] = {}
        for layer in range(first, min(layers, first + LAYERS_PER_FILE)):
            for number, (name, shape) in enumerate(shapes.items()):
                start = (layer * 7919 + number * 104_729) % 100_000  # other groups in every weight
                count = shape[0] * shape[1]
                part[f"model.layers.{layer}.{name}.weight"] = values[start : start + count].clone().view(shape)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                part[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        write(part)
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    write({"lm_head.weight": values.flip(0).view(VOCABULARY, HIDDEN), "model.norm.weight": norm})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    config |= {"intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    config |= {"num_key_value_heads": HEADS // 2, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def show(found: dict[str, object], console: Console) -> None:
    """Print what was found beside what is allowed."""
    number = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    console.print(
        f"{number['dense_bytes'] / 1e9:.2f} GB in {found['files']} files, {found['weights']} weights made 2:4 in "
        f"{number['seconds']:.1f} s ({number['dense_bytes'] / 1e6 / number['seconds']:.0f} MB/s; copying takes "
        f"{number['copy_seconds']:.1f} s)\npeak memory {number['peak_bytes'] / 1e6:.0f} MB, resumed "
        f"{number['resumed_peak_bytes'] / 1e6:.0f} MB, allowed {ALLOWED / 1e6:.0f} MB\nkilled with "
        f"{found['files_before_kill']} of {found['files']} files finished, resumed in "
        f"{number['resumed_seconds']:.1f} s to the same bytes",
        highlight=False,
        soft_wrap=True,
    )


def _start(source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cases.files", str(source), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _finished(process: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for a run and return what it found of itself."""
    said, complaint = process.communicate()
    if process.returncode:
        raise MeasureError("twofour prune failed", got=complaint[-400:])
    return json.loads(said.splitlines()[-1])


def child(source: str, out: str) -> dict[str, float]:
    """Run the command here; return its seconds, without those of starting Python, and the peak of resident memory.

    The peak is of everything: Python, torch, transformers, and the pages of mapped files.
    """
    from twofour.cli import app

    start = time.perf_counter()
    app(["prune", source, "--out", out], standalone_mode=False)
    seconds = time.perf_counter() - start
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if peak is None:
        raise MeasureError("peak memory is not known", got=sys.platform, wanted="Linux")
    return {"seconds": seconds, "peak_bytes": int(peak[1]) * 1024}


def _killed(source: Path, out: Path, files: int) -> int:
    """Start a run and kill it in the file after the first `files`; return how many were finished."""
    process, journal = _start(source, out), out.with_name(f"{out.name}.journal.json")
    try:
        while (done := _done(journal)) < files:
            if process.poll() is not None:
                raise MeasureError("twofour prune ended before it could be killed", got=f"exit {process.returncode}")
            time.sleep(0.02)
        time.sleep(0.1)  # into the next file
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return max(done, _done(journal))


def _done(journal: Path) -> int:
    try:
        return len(json.loads(journal.read_text())["done"])
    except FileNotFoundError:
        return 0


def _copied(source: Path, target: Path) -> float:
    """Copy and flush the checkpoint; return the seconds."""
    start = time.perf_counter()
    shutil.copytree(source, target)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def _require_same(whole: Path, resumed: Path) -> None:
    names = sorted(path.name for path in whole.iterdir())
    own = {"report.json"}  # names the folder it was written to
    if names != sorted(path.name for path in resumed.iterdir()):
        raise MeasureError(
            "the resumed run wrote other files", got=str(sorted(path.name for path in resumed.iterdir()))
        )
    for name in names:
        if name not in own and not filecmp.cmp(whole / name, resumed / name, shallow=False):
            raise MeasureError("the resumed run wrote other bytes", got=name)


if __name__ == "__main__":
    print(json.dumps(child(*sys.argv[1:])))

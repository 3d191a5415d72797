"""Damaged checkpoints: an error of ours, or weights that obey what is said of them; never a crash."""

import io
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from tests.importing.small import DATA, sparse
from tests.importing.test_asp import asp_state
from tests.importing.test_semi_structured import bitmask, tiles_of_four, wrapped
from tests.turns import in_turn
from twofour import importing
from twofour.errors import TwofourError
from twofour.packing import Packed
from twofour.patterns import parse

KINDS = (
    "sparse_24_bitmask",
    "sparse_bitmask",
    "bitmask_float8",
    "bitmask_int8",
    "marlin_24",
    "cutlass",
    "asp",
    "zeros",
)
quickly = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def base(kind: str) -> dict[str, Tensor]:
    """A sound checkpoint of each kind."""
    torch.manual_seed(1)
    if kind == "cutlass":
        weight = tiles_of_four(64, torch.float16)
        packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
        parts = {"packed": packed, "meta": meta, "compressed_swizzled_bitmask": bitmask(weight)}
        return {f"fc.weight.{name}": part for name, part in parts.items()} | {"fc.bias": torch.zeros(64)}
    if kind == "asp":
        return asp_state(stowed=True)
    if kind == "zeros":
        return {"fc.weight": sparse(16, 32), "head.weight": torch.randn(8, 16)}
    return load_file(DATA / kind / "model.safetensors")


def decoded(path: Path) -> None:
    """Decode; what comes back must be what it is said to be."""
    try:
        found = importing.decode(path)
    except TwofourError:
        return
    weights = found.weights()
    for name, entry in found.sparse.items():
        if isinstance(entry.weight, Packed):
            entry.weight.validate()
        dense = weights[name]
        assert bool(torch.isfinite(dense.float()).all())
        assert parse(entry.pattern).check(dense.movedim(entry.axis, -1).float()).ok
        assert entry.keep is None or not bool((dense.ne(0) & ~entry.keep).any())
    contents = found.contents()
    assert contents.packed.keys() == found.sparse.keys()


DTYPES = (torch.float32, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def changed(draw: Any, tensor: Tensor) -> Tensor:
    """One tensor with a few bytes, its shape or its type changed."""
    what = draw(st.sampled_from(("bytes", "cut", "type", "turn", "flat", "empty")))
    if what == "bytes" and tensor.numel():
        raw = np.frombuffer(bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()), dtype=np.uint8)
        for _ in range(draw(st.integers(1, 4))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
        if tensor.dtype == torch.bool:
            raw &= 1
        return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)
    if what == "cut" and tensor.ndim:
        axis = draw(st.integers(0, tensor.ndim - 1))
        return tensor.narrow(axis, 0, draw(st.integers(0, tensor.shape[axis]))).contiguous()
    if what == "type":
        return tensor.float().to(draw(st.sampled_from(DTYPES)))
    if what == "turn" and tensor.ndim > 1:
        return tensor.transpose(0, 1).contiguous()
    return tensor.flatten() if what == "flat" else tensor.new_zeros(0)


def damaged(draw: Any, kind: str) -> dict[str, Tensor]:
    state = dict(base(kind))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(state)))
        match draw(st.sampled_from(("change", "change", "drop", "rename", "swap"))):
            case "drop" if len(state) > 1:
                state.pop(name)
            case "rename":
                state[draw(st.sampled_from((f"x.{name}", f"{name}.bitmask", "weight", f"{name}.meta")))] = state[name]
            case "swap":
                state[name] = state[draw(st.sampled_from(sorted(state)))]
            case _:
                state[name] = changed(draw, state[name])
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


@in_turn("kind", KINDS)
@quickly
@given(chosen=st.data())
def test_damaged_tensors_never_crash(kind: str, chosen: st.DataObject) -> None:
    state = damaged(chosen.draw, kind)
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder) / "m.safetensors")
        decoded(Path(folder) / "m.safetensors")


@pytest.mark.parametrize("kind", ["sparse_24_bitmask", "cutlass"])
@quickly
@given(data=st.data())
def test_damaged_safetensors_never_crash(kind: str, data: st.DataObject) -> None:
    content = bytearray(save(base(kind)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 900) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from((len(content), len(content) // 2)))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "m.safetensors").write_bytes(content)
        decoded(Path(folder) / "m.safetensors")


@cache
def pickled() -> bytes:
    weight = tiles_of_four(64, torch.float16)
    packed, meta = sparse_semi_structured_from_dense_cutlass(weight)
    state: dict[str, Any] = {"fc.weight": wrapped(SparseSemiStructuredTensorCUTLASS, weight, packed=packed, meta=meta)}
    state |= {"other.weight": sparse(8, 16), "other.__weight_mma_mask": torch.ones(8, 16, dtype=torch.bool)}
    buffer = io.BytesIO()
    torch.save({"state_dict": state, "step": 3}, buffer)
    return buffer.getvalue()


@quickly
@given(data=st.data())
def test_damaged_pickles_never_crash_and_run_nothing(data: st.DataObject) -> None:
    """The pickle is changed and the archive's checksums written anew, so that torch's unpickler sees the damage."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pickled())) as whole, zipfile.ZipFile(written, "w") as archive:
        for entry in whole.infolist():
            content = bytearray(whole.read(entry))
            if entry.filename.endswith("data.pkl"):
                for _ in range(data.draw(st.integers(1, 4))):
                    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
            archive.writestr(entry.filename, bytes(content))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "m.pt").write_bytes(written.getvalue())
        decoded(Path(folder) / "m.pt")

"""llama.cpp's product (ggml's `mul_mat` on the CPU) with weights of 1 bit, ternary ones and 4 bits: a peer of our rows.

It is timed where TWOFOUR_GGML names the folder of its shared libraries, as cmake builds them from a source tree:

    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=ON
    cmake --build build --target ggml ggml-cpu
    TWOFOUR_GGML=build/bin make bench OP=bits

Its types have a scale of their own for each block of weights, and inputs are rounded to 8 bits in
blocks inside the call; 4 bits are not repacked, which its models do while they are loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twofour.errors import MeasureError
from twofour.kernels.bits_matmul import TERNARY, BitWeight, bipolar, twos

NAME, SHORT = "llama.cpp", "llama.cpp"
WHERE = "TWOFOUR_GGML"

_F32 = 0
_TYPES = {"w1": (("Q1_0", 41, 128),), "ternary": (("TQ2_0", 35, 256), ("TQ1_0", 34, 256)), "w4": (("Q4_0", 2, 32),)}
"""Weights -> name, number in the enum `ggml_type` and weights of a block of each type that holds them."""

NEAR = 0.03
"""How far its answer may lie from the real product, as a share of it: inputs are rounded to 8 bits."""


class _Parameters(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """`ggml_cplan` up to the fields that are written here, and room for those behind, which differ between versions."""

    _fields_ = (("work_size", ctypes.c_size_t), ("work", ctypes.c_void_p), ("further", ctypes.c_uint64 * 14))


@cache
def _library() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Return ggml's tensors and its CPU kernels, None where no folder is named.

    Raises:
        MeasureError: The folder lacks them.
    """
    folder = os.environ.get(WHERE)
    if not folder:
        return None
    try:
        base, cpu = (
            ctypes.CDLL(str(Path(folder) / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        )
    except OSError as error:
        raise MeasureError(
            f"{WHERE} names no folder of ggml's libraries", got=str(error), wanted="libggml-base.so and libggml-cpu.so"
        ) from error
    pointer, many = ctypes.c_void_p, ctypes.c_int64
    base.ggml_init.restype, base.ggml_init.argtypes = pointer, [_Parameters]
    base.ggml_new_tensor_2d.restype, base.ggml_new_tensor_2d.argtypes = pointer, [pointer, ctypes.c_int, many, many]
    base.ggml_get_data.restype, base.ggml_get_data.argtypes = pointer, [pointer]
    base.ggml_mul_mat.restype, base.ggml_mul_mat.argtypes = pointer, [pointer] * 3
    base.ggml_new_graph.restype, base.ggml_new_graph.argtypes = pointer, [pointer]
    base.ggml_build_forward_expand.restype, base.ggml_build_forward_expand.argtypes = None, [pointer] * 2
    base.ggml_free.restype, base.ggml_free.argtypes = None, [pointer]
    base.ggml_row_size.restype, base.ggml_row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, many]
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, many, many, many, pointer]
    cpu.ggml_graph_plan.restype, cpu.ggml_graph_plan.argtypes = _Plan, [pointer, ctypes.c_int, pointer]
    cpu.ggml_graph_compute.restype, cpu.ggml_graph_compute.argtypes = ctypes.c_int, [pointer, pointer]
    cpu.ggml_cpu_init()
    return base, cpu


class _Product:
    """One weight in one of its types, and the plan of its product on one thread; what ggml allocates stays."""

    def __init__(self, kind: int, weight: Tensor, x: Tensor) -> None:
        found = _library()
        assert found is not None
        base, self._cpu = found
        (rows, columns), tokens = weight.shape, len(x)
        size = base.ggml_row_size(kind, columns) * rows + 4 * tokens * (columns + rows) + (4 << 20)
        context = base.ggml_init(_Parameters(size, None, False))
        held = base.ggml_new_tensor_2d(context, kind, columns, rows)
        given = base.ggml_new_tensor_2d(context, _F32, columns, tokens)
        base.ggml_quantize_chunk(kind, weight.data_ptr(), base.ggml_get_data(held), 0, rows, columns, None)
        ctypes.memmove(base.ggml_get_data(given), x.data_ptr(), 4 * x.numel())
        answer = base.ggml_mul_mat(context, held, given)
        self._graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(self._graph, answer)
        self._plan = self._cpu.ggml_graph_plan(self._graph, 1, None)
        self._work = ctypes.create_string_buffer(self._plan.work_size + 64)
        self._plan.work = ctypes.addressof(self._work)
        self._at, self._shape = base.ggml_get_data(answer), (tokens, rows)

    def __call__(self) -> None:
        """Compute."""
        if self._cpu.ggml_graph_compute(self._graph, ctypes.byref(self._plan)):
            raise MeasureError(f"{NAME} did not compute", got=str(self._shape))

    def answer(self) -> Tensor:
        """Return a copy of what was computed last, float32 (tokens, out)."""
        tokens, rows = self._shape
        return (
            torch.frombuffer((ctypes.c_float * (tokens * rows)).from_address(self._at), dtype=torch.float32)
            .clone()
            .view(self._shape)
        )


def calls(weight: BitWeight, x: Tensor, *, rounded: bool, copies: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of a type and its product with a copy of a weight on one thread, checked; nothing without ggml.

    Args:
        weight: One scale an output, bipolar of 1 bit or ternary; or two's complement of 4 bits in groups of 32.
        x: float32 (tokens, in).
        rounded: Whether it may round inputs.
        copies: Graphs of each type, each with a weight of its own.

    Raises:
        MeasureError: Its answer is another.
    """
    plain = not weight.group and not weight.shifted
    kinds = {bipolar(1): "w1", TERNARY: "ternary"} if plain else {twos(4): "w4"} if weight.group == 32 else {}
    kind = kinds.get(weight.levels)
    if not rounded or kind is None or weight.shifted or _library() is None:
        return
    real = weight.real().contiguous()
    want = x.double() @ real.double().T
    for name, number, block in _TYPES[kind]:
        if weight.shape[1] % block:
            continue
        for index in range(copies):
            product = _Product(number, real, x)
            product()
            if index == 0 and (product.answer() - want).norm() > NEAR * want.norm():
                raise MeasureError(f"{NAME} {name} is wrong and is not timed", got=f"{weight.levels}")
            yield name, product

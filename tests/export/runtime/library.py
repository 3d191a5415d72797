"""libtwofour as C sees it, through ctypes, and programs of single calls for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twofour import native
from twofour.export.runtime import library
from twofour.export.runtime.file import encoded
from twofour.export.runtime.program import Call, Constants, Lying, Program
from twofour.graph.executor.replay import TYPES

OK, ARGUMENT, FILE, DAMAGED, VERSION, UNSUPPORTED, INPUT, MEMORY, REFUSED = range(9)
"""twofour_status."""

EACH = ctypes.CFUNCTYPE(None, c_void_p, c_int64)
PARALLEL = ctypes.CFUNCTYPE(None, c_void_p, c_int64, EACH, c_void_p)


class Options(ctypes.Structure):
    """twofour_options."""

    _fields_ = (("size", c_size_t), ("threads", c_int32), ("parallel", PARALLEL), ("pool", c_void_p))


class Description(ctypes.Structure):
    """twofour_description."""

    _fields_ = (
        *(("name", c_char_p), ("type", c_int32), ("axes", c_int32)),
        *(("shape", POINTER(c_int64)), ("bytes", c_uint64)),
    )


class Given(ctypes.Structure):
    """twofour_tensor."""

    _fields_ = (
        *(("name", c_char_p), ("type", c_int32), ("axes", c_int32)),
        *(("shape", POINTER(c_int64)), ("data", c_void_p), ("bytes", c_uint64)),
    )


class RefusedError(Exception):
    """What the library answered: `status` and its text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@cache
def functions() -> Any:
    """Load the library."""
    found = ctypes.CDLL(str(library()))
    found.twofour_version.restype = c_char_p
    found.twofour_load.argtypes = (c_char_p, POINTER(Options), POINTER(c_void_p), c_void_p, c_size_t)
    found.twofour_load_memory.argtypes = (c_void_p, c_size_t, POINTER(Options), POINTER(c_void_p), c_void_p, c_size_t)
    found.twofour_free.argtypes = (c_void_p,)
    found.twofour_free.restype = None
    found.twofour_programs.argtypes = (c_void_p,)
    for name in ("twofour_inputs", "twofour_outputs"):
        getattr(found, name).argtypes = (c_void_p, c_int32)
    for name in ("twofour_input", "twofour_output"):
        getattr(found, name).argtypes = (c_void_p, c_int32, c_int32, POINTER(Description))
    found.twofour_run.argtypes = (c_void_p, POINTER(Given), c_size_t, POINTER(Given), c_size_t, c_void_p, c_size_t)
    return found


def checked(call: Callable[[Any, int], int]) -> None:
    """Make a call with room for an error's text; raise what it answers."""
    text = ctypes.create_string_buffer(4096)
    status = call(text, len(text))
    assert (status == OK) == (text.value == b""), (status, text.value)
    if status != OK:
        raise RefusedError(status, text.value.decode(errors="replace"))  # it may quote the file


class Model:
    """A loaded model: `content` is a path or the bytes of a file."""

    def __init__(self, content: Any, threads: int = 0, parallel: Any = None) -> None:
        self.handle, self.parallel = c_void_p(), PARALLEL(parallel or 0)
        options = Options(ctypes.sizeof(Options), threads, self.parallel, None)
        if isinstance(content, bytes | bytearray):
            memory = (ctypes.c_char * len(content)).from_buffer_copy(content)
            checked(
                lambda *error: functions().twofour_load_memory(
                    memory, len(content), byref(options), byref(self.handle), *error
                )
            )
        else:
            path = str(content).encode()
            checked(lambda *error: functions().twofour_load(path, byref(options), byref(self.handle), *error))

    def __del__(self) -> None:
        functions().twofour_free(self.handle)

    @property
    def programs(self) -> int:
        """How many there are."""
        return functions().twofour_programs(self.handle)

    def described(self, role: str, program: int = 0) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return names, types and shapes of the "input"s or "output"s of a program."""
        found = []
        for index in range(getattr(functions(), f"twofour_{role}s")(self.handle, program)):
            one = Description()
            assert getattr(functions(), f"twofour_{role}")(self.handle, program, index, byref(one)) == OK
            shape = tuple(one.shape[: one.axes])
            found.append((one.name.decode(errors="replace"), TYPES[one.type], shape))
            assert one.bytes == torch.empty(shape, dtype=TYPES[one.type], device="meta").nbytes
        return found

    def run(
        self, inputs: Mapping[str, Tensor], program: int = 0, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the outputs of a program, or those named."""
        made = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in self.described("output", program)}
        made = {name: made[name] for name in names or made}
        given, wanted = [given_tensor(*one) for one in inputs.items()], [given_tensor(*one) for one in made.items()]
        self.call(given, wanted)
        return made

    def call(self, given: Sequence[Given], wanted: Sequence[Given]) -> None:
        """Call twofour_run."""
        lists = (Given * len(given))(*given), len(given), (Given * len(wanted))(*wanted), len(wanted)
        checked(lambda *error: functions().twofour_run(self.handle, *lists, *error))


def given_tensor(name: str, tensor: Tensor) -> Given:
    """Describe a contiguous tensor, which the caller keeps."""
    shape = (c_int64 * tensor.ndim)(*tensor.shape)
    return Given(name.encode(), TYPES.index(tensor.dtype), tensor.ndim, shape, tensor.data_ptr(), tensor.nbytes)


def recorded_call(
    function: Callable[..., Any], arguments: Sequence[Any], change: Callable[[bytes], bytes] = bytes
) -> tuple[bytearray, dict[str, Tensor], dict[str, Tensor]] | None:
    """Return a file that makes one call of the extension, its inputs, and its outputs; None where none is recorded.

    The first operand of float32 without gaps is an input, the others are constants; `change`: of the call's arguments.
    """
    noted: list[Any] = []

    def note(*one: Any) -> None:
        noted.append(one)

    native.extension().record_calls(note)
    try:
        function(*arguments)
    finally:
        native.extension().record_calls(None)
    if not noted:
        return None
    call, tensors, written = noted[0]
    constants, places = Constants(), []
    program, inputs, outputs = Program([]), {}, {}
    indices = []
    for tensor, writes in zip(tensors, written, strict=True):
        indices.append(-1 if tensor is None else len(places))
        if tensor is None:
            continue
        rest = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if writes:
            places.append(Lying("arena", 0, program.arena, *rest))
            program.outputs.append((f"y{len(outputs)}", len(places) - 1))
            outputs[f"y{len(outputs)}"] = tensor.clone()
            program.arena += -(-tensor.nbytes // 64) * 64
        elif not inputs and tensor.is_contiguous() and tensor.dtype is torch.float32:
            inputs["x"] = tensor
            program.inputs.append(("x", tensor))
            places.append(Lying("input", 0, 0, *rest))
        else:
            constants.note(tensor)
            places.append(tensor)
    program.places, program.calls = places, [Call(call.name, change(call.arguments()), tuple(indices))]
    return encoded([program], constants), inputs, outputs

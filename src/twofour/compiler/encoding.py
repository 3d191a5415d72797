"""The computing type of a compiled model, and how its weights are written for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour.errors import CompileError, PackingError
from twofour.packing import Packed, pack
from twofour.packing.quantize import GROUPS
from twofour.patterns import parse

DTYPES = ("float32", "bfloat16", "int8", "int4")

GPU_DTYPES = (*DTYPES, "float16", "float8")
"""Computing types on a GPU; float8 is e4m3."""

WEIGHTS = {"float32": (torch.float32,)}
"""dtypes of model weights that a computing type takes; the others take every one of `REAL`."""

REAL = (torch.float32, torch.bfloat16)

GPU_REAL = (*REAL, torch.float16)

_OTHER_NAMES = {"half": "bfloat16", "bfloat": "bfloat16"}


def dtype_name(dtype: Any) -> Any:
    """Return the name of one of torch's dtypes; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def nearest_dtype(given: object) -> str:
    """Return the computing type that `given` comes nearest to: of as many bits, else float32."""
    text = str(dtype_name(given)).lower()
    if text in _OTHER_NAMES:
        return _OTHER_NAMES[text]
    bits = re.search(r"\d+", text)
    return {"4": "int4", "8": "int8", "16": "bfloat16"}.get(bits.group() if bits else "", "float32")


def _nearest_group(given: object) -> int:
    try:
        number = int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return 64
    return min(GROUPS, key=lambda group: abs(group - number))


_TWO_FOUR = parse("2:4")


_GPU_TOO = "; models on an NVIDIA GPU take it"


@dataclass(frozen=True)
class Encoding:
    """How the weights of a compiled model are written.

    Attributes:
        dtype: Computing type, one of `DTYPES`.
        group: Inputs that share a scale in int4.
        symmetric: Whether int4 has no zero points.
        device: "cpu" or "cuda": where the model is, which decides what types there are.
    """

    dtype: str = "float32"
    group: int = 64
    symmetric: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        known = GPU_DTYPES if self.device == "cuda" else DTYPES
        for what, given, allowed in (("dtype", self.dtype, known), ("group", self.group, GROUPS)):
            if given not in allowed:
                near = nearest_dtype(given) if what == "dtype" else _nearest_group(given)
                wanted = " or ".join(map(repr, allowed))
                raise CompileError(
                    f"the {what} is not known",
                    got=repr(given),
                    wanted=wanted,
                    remedy=f"pass {what}={near!r}{_GPU_TOO if given in GPU_DTYPES else ''}",
                )

    @classmethod
    def of(cls, dtype: str, device: str = "cpu", **options: Any) -> Encoding:
        """Return the encoding with the options that are not None.

        Raises:
            CompileError: One is unknown, or is given although the computing type has nothing of the kind.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if given and dtype != "int4" and dtype in DTYPES:
            raise CompileError(
                f"`{next(iter(given))}` means nothing in {dtype}",
                got=", ".join(f"{name}={value!r}" for name, value in given.items()) + f", dtype={dtype!r}",
                wanted='these options with dtype="int4" alone: int8 has one scale per output channel, floats have none',
                remedy=f'leave {" and ".join(given)} out, or pass dtype="int4"',
            )
        return cls(dtype, device=device, **given)

    def takes(self, weight: Tensor) -> bool:
        """Tell whether a model weight of this dtype can be written so."""
        if self.device == "cuda":
            return weight.dtype in GPU_REAL
        return weight.dtype in WEIGHTS.get(self.dtype, REAL)

    @property
    def stored(self) -> str:
        """How packed values are written: float8 rows round float32 values themselves."""
        return "float32" if self.dtype == "float8" else self.dtype

    def bytes_of(self, rows: int, columns: int) -> float:
        """Return the bytes of a dense weight of this size in this encoding, scales left out."""
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1, "int4": 0.5}
        return rows * columns * sizes[self.dtype]

    @property
    def plain_itemsize(self) -> int:
        """Bytes of one value of a weight that a file holds dense: whole numbers are written as the floats they are."""
        return 2 if self.dtype in ("bfloat16", "float16") else 4

    def encode(self, weight: Packed | Tensor) -> tuple[Packed | Tensor, str]:
        """Return the weight (out, in) packed, and "", or as it was with the reason why it cannot be packed.

        A packed weight of another dtype (from a file) is written anew.
        """
        if isinstance(weight, Packed):
            header = weight.header
            if (header.pattern, header.dtype) == ("2:4", self.stored) and bool(header.group) == (self.dtype == "int4"):
                return weight, ""
            weight = weight.unpack().float()
        columns = weight.shape[1]
        if columns % 4:
            return weight, f"in_features {columns} is not a multiple of 4"
        try:
            if self.dtype == "int4":
                return pack(weight, _TWO_FOUR, "int4", group=self.group, symmetric=self.symmetric), ""
            return pack(weight, _TWO_FOUR, self.stored), ""
        except PackingError as error:
            found = _TWO_FOUR.check(weight)
            if found.ok:
                return weight, f"{error.what}: {error.got}"
            return weight, f"not 2:4, {found.groups - found.legal} of {found.groups} groups have 3 or 4 non-zeros"

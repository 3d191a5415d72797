"""Dense float32 weights in panels: the dense product of our own, which no library's call stands before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twofour.kernels.dense_matmul.native_dense import RealPanels


@dataclass(frozen=True)
class Float32Matmul(RealPanels):
    """y = x @ W.T + bias with W dense, float32, in panels of 32 outputs, input by input."""

    whole_rows: ClassVar[bool] = True

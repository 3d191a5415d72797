"""Low bits: models that compute as their whole numbers will, while they are trained and before.

`quantize` makes a model of 1 to 8 bits. `attach` trains a masked model for the rounding of `compile(dtype="int8")`.
"""

from typing import TYPE_CHECKING, Any

from twofour.quantization.carried import LowBits, held_by, of
from twofour.quantization.quantize import quantize, remove
from twofour.quantization.reference import in_whole_numbers
from twofour.quantization.widths import Widths

if TYPE_CHECKING:
    from twofour.quantization.qat import QAT, attach

__all__ = ["QAT", "LowBits", "Widths", "attach", "held_by", "in_whole_numbers", "of", "quantize", "remove"]


def __getattr__(name: str) -> Any:
    if name in ("QAT", "attach"):  # of training, which imports all of torch.compile: a file that is read needs neither
        from twofour.quantization import qat

        return getattr(qat, name)
    raise AttributeError(f"module 'twofour.quantization' has no attribute {name!r}")

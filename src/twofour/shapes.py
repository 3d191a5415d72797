"""Shapes and types of tensors in annotations: `Float[Tensor, "*rows reduction"]`, axes named as in the docstrings.

A type checker reads `Tensor`, and so does who evaluates an annotation. Where jaxtyping was imported before, as in our
tests, the names are jaxtyping's, and its import hook checks every call. Nothing here imports it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Bool", "Float", "Float32", "Int", "Int8", "Int32", "Int64", "Real", "Shaped", "UInt8"]

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as Int
    from typing import Annotated as Int8
    from typing import Annotated as Int32
    from typing import Annotated as Int64
    from typing import Annotated as Real
    from typing import Annotated as Shaped
    from typing import Annotated as UInt8
elif sys.modules.get("jaxtyping"):
    from jaxtyping import Bool, Float, Float32, Int, Int8, Int32, Int64, Real, Shaped, UInt8
else:

    class _Unchecked:
        def __class_getitem__(cls, annotated: tuple[Any, str]) -> Any:
            return annotated[0]

    Bool = Float = Float32 = Int = Int32 = Int64 = Int8 = Real = Shaped = UInt8 = _Unchecked

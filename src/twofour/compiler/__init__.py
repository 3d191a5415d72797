"""Where kernels go in a model: measured choices, the compiled copy and its plan."""

from twofour.compiler.advice import Advice, AdviceRow
from twofour.compiler.advise import advise
from twofour.compiler.choose import DEFAULT_TOKENS
from twofour.compiler.compile import compile
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.plan import LayerPlan, Plan

__all__ = [
    "DEFAULT_TOKENS",
    "Advice",
    "AdviceRow",
    "CompiledConv",
    "CompiledLinear",
    "LayerPlan",
    "Plan",
    "advise",
    "compile",
]

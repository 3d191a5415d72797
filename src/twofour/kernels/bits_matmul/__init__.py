"""y = x @ W.T + bias with x and W of 1 to 8 bits: reference and native kernels."""

from twofour.kernels.bits_matmul.coded import BitsProblem, CodedAnswer, CodeSteps, float_of, order_of, step_of
from twofour.kernels.bits_matmul.codes import TERNARY, BitWeight, Levels, bipolar, twos, unsigned
from twofour.kernels.bits_matmul.cpu import BitsMatmul, bits_rows
from twofour.kernels.bits_matmul.layout import GROUPS, from_layout, to_layout
from twofour.kernels.bits_matmul.reference import bits_matmul_reference, whole_product

__all__ = [
    "GROUPS",
    "TERNARY",
    "BitWeight",
    "BitsMatmul",
    "BitsProblem",
    "CodeSteps",
    "CodedAnswer",
    "Levels",
    "bipolar",
    "bits_matmul_reference",
    "bits_rows",
    "float_of",
    "from_layout",
    "order_of",
    "step_of",
    "to_layout",
    "twos",
    "unsigned",
    "whole_product",
]

"""The price of a layer of low bits on a machine's units: a rule that is stated, not a fit.

Libraries have no units for every pair of 1 to 7 bits. Whole numbers are multiplied on int8 units, after they were
unpacked in registers, whose work is not counted; where inputs stay floats, on units of the computing type. The weight
travels and is loaded in its own bits, with 4 bytes of scale an output, activations in bytes.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from twofour import quantization
from twofour.compiler.codes import hold_floats, is_coded
from twofour.hardware.costs import Costs, price
from twofour.hardware.fitted import FITTED
from twofour.hardware.machine import Machine
from twofour.hardware.matmul_shapes import Product
from twofour.hardware.work import cut
from twofour.quantization import LowBits
from twofour.quantization.layer import take_low_bits
from twofour.quantization.stored import scale_bytes, stored_encoding

SINGLE_BITS = {
    "ampere": "of 1-bit products A100 has 4992 TOP/s (NVIDIA's whitepaper), and no library a kernel",
    "ada": "1-bit products are instructions of Ada without a published rate, and no library has a kernel",
    "hopper": "Hopper has no published rate of 1-bit products: AND is an instruction, XOR takes two (ptxas 12.8)",
    "blackwell": "Blackwell has no 1-bit units: their instructions become products of bytes (ptxas 12.8)",
    "blackwell-rtx": "Blackwell has no 1-bit units: their instructions become products of bytes (ptxas 12.8)",
}
"""What a family of machines has of products of single bits, which are not priced: docs/sparse_tensor_core.md."""


def as_floats(model: nn.Module) -> nn.Module:
    """Return a model that shares every tensor and whose layers compute in floats, so that their products are seen."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for name in quantization.of(twin):
        module = twin.get_submodule(name)
        if is_coded(module):
            weight = module.weight
            assert isinstance(weight, Tensor)
            hold_floats(module, torch.empty(weight.shape, dtype=weight.dtype, device="cpu"))  # no value is read
        take_low_bits(module)
    return twin


def units_of(held: LowBits, machine: Machine, dtype: str) -> str:
    """Return the type whose units multiply: int8 where inputs are whole numbers and the machine has such units."""
    return "int8" if held.widths.inputs is not None and "int8" in machine.dense else dtype


def of_low_bits(product: Product, held: LowBits, machine: Machine, dtype: str, *, cold: bool) -> Costs:
    """Return what a product with a weight of low bits takes, arrays of one.

    Args:
        product: Its sizes.
        held: Widths of the layer.
        machine: The machine.
        dtype: Computing type of layers with float inputs.
        cold: Whether the weights come from memory, as in `costs`.
    """
    units = units_of(held, machine, dtype)
    stored = (stored_encoding(held).width(product.k) + scale_bytes(held, 1, product.k)) / product.k
    work = cut(machine, units, False, product.m, product.n, product.k, product.batch, weight=stored)
    return price(work, machine, units, False, cold=cold, fitted=FITTED)

"""How Sparse Tensor Cores see a packed weight: instructions, fragments and the layouts that kernels load.

docs/sparse_tensor_core.md describes it; what no running code has confirmed says so in its `evidence`.
"""

from twofour.tensor_core.bits import MMA_B1, BitInstruction, bit_product, execute_b1
from twofour.tensor_core.element import ELEMENTS, Element
from twofour.tensor_core.execute import execute
from twofour.tensor_core.instruction import INSTRUCTIONS, MMA_SP, WGMMA_SP, Instruction, instruction, widest
from twofour.tensor_core.multiply import multiply
from twofour.tensor_core.operand import CODES, Operand
from twofour.tensor_core.sm80 import from_sm80, to_sm80
from twofour.tensor_core.sm90 import from_sm90, to_sm90
from twofour.tensor_core.warp import WarpOrder, to_warp

__all__ = [
    "CODES",
    "ELEMENTS",
    "INSTRUCTIONS",
    "MMA_B1",
    "MMA_SP",
    "WGMMA_SP",
    "BitInstruction",
    "Element",
    "Instruction",
    "Operand",
    "WarpOrder",
    "bit_product",
    "execute",
    "execute_b1",
    "from_sm80",
    "from_sm90",
    "instruction",
    "multiply",
    "to_sm80",
    "to_sm90",
    "to_warp",
    "widest",
]

"""Fused blocks: element-wise, broadcast and reduce operators as one native call, interpreted tile by tile."""

from twofour.kernels.fused_block.cpu import fused_block
from twofour.kernels.fused_block.expression import Expression, Value, steps
from twofour.kernels.fused_block.reference import fused_block_reference
from twofour.kernels.fused_block.schedule import program

__all__ = ["Expression", "Value", "fused_block", "fused_block_reference", "program", "steps"]

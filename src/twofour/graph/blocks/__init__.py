"""Fused blocks in a graph: what stands between products, convolutions and attention as few native calls."""

from twofour.graph.blocks.block import FusedBlock
from twofour.graph.blocks.candidate import Candidate
from twofour.graph.blocks.planner import Blocks, fuse_blocks
from twofour.graph.blocks.times import APART, FUSED, Always, Measured, Times

__all__ = ["APART", "FUSED", "Always", "Blocks", "Candidate", "FusedBlock", "Measured", "Times", "fuse_blocks"]

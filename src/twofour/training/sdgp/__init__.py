"""SDGP, structured data gradient pruning: the gradient that a layer hands back is computed from a dL/dz pruned N:M.

McDanel, Dinh and Magallanes 2022, "Accelerating DNN Training with Structured Data Gradient Pruning" (arXiv 2202.00774).
Forward pass, weights and the gradients of weight and bias are dense and exact. docs/sdgp.md says what is approximated.
"""

from twofour.training.sdgp.handle import Handle, attach
from twofour.training.sdgp.rule import MODES, Rule, pruned

__all__ = ["MODES", "Handle", "Rule", "attach", "pruned"]

"""A Linear whose three products of a training step may each have a sparse operand.

| product (`PRODUCTS`) | A B^T | what may be sparse, by its `Source` |
| --- | --- | --- |
| "forward" | Y = X W^T | W, masked (`both_ways.masked_weight`) |
| "data" | dX = dZ (W^T)^T | W^T, masked along that axis too; or dZ, pruned (`sdgp.pruned_gradient`) |
| "weight" | dW = dZ^T (X^T)^T | dZ^T, an unbiased estimate of it (`both_ways.estimate`) |

`module.SparseLinear` is the layer and its autograd function. It hands each product to `products.LinearProducts`, as a
`source.Call`. That runs the call as a `plan.Choice` says: the source makes the sparse operand and a 2:4 kernel
multiplies by it, or one of the dense `implementations` does. `chooser` makes the choice by measuring. `both_ways` and
`sdgp` are two configurations: the sources of a layer, when its choices are made, and a handle.
"""

from twofour.training.sparse_linear.plan import PRODUCTS, Choice, LayerPlan, Plan
from twofour.training.sparse_linear.products import LinearProducts
from twofour.training.sparse_linear.source import EXACT, Call, Source
from twofour.training.sparse_linear.workspace import Workspace

__all__ = ["EXACT", "PRODUCTS", "Call", "Choice", "LayerPlan", "LinearProducts", "Plan", "Source", "Workspace"]

"""Functions between the layers of a training step, whose backward passes are native: attention, GELU, SiLU.

While the forward pass of a model runs that `both_ways` or `sdgp` is attached to, a mode of torch (`mode`) sees the
functions that it calls, by a module or not. Where one of `functions` serves the call, and was measured to be faster,
forward and backward pass together, it takes the call's place. What is compiled, traced, transformed by functorch or
recomputed by checkpointing is left to torch, and so is what `nn.MultiheadAttention` calls: torch takes modes off there.
"""

from twofour.training.fused.mode import apart, fused_of, load_state, put_on, state_of, take_off

__all__ = ["apart", "fused_of", "load_state", "put_on", "state_of", "take_off"]

"""The Mask: a weight that stays sparse through training, with torch's own hooks and nothing wrapped or patched.

Kept sparse: every subclass of `torch.optim.Optimizer`, fused, foreach, capturable and compiled ones too; copies, loads,
casts, DDP and FSDP2, under which a mask is a DTensor sharded as its weight is. The hooks run between the graphs of
`torch.compile`, so a step compiles with graph breaks there; torch's own optimisers break the graph as well, and
`fullgraph=True` over a step is impossible with or without masks.

Refused at the next step: a module that has lost its parameter (FSDP1, parametrisations registered after pruning).

Not seen, since no optimiser here steps the parameter: separate master copies and functional optimisers. Call `enforce`
after their step, and `twofour.check` tells when it was forgotten. State that 8-bit optimisers hold in codes or tensor
subclasses is left alone. DDP broadcasts buffers, masks among them, at each forward: `broadcast_buffers=False` spares it
where no other buffer needs it.
"""

from twofour.masks.checkpoint import derive, load_state_dict, state_dict
from twofour.masks.mask import Mask, attach, attach_all, detach, enforce, of

__all__ = [
    "Mask",
    "attach",
    "attach_all",
    "derive",
    "detach",
    "enforce",
    "load_state_dict",
    "of",
    "state_dict",
]

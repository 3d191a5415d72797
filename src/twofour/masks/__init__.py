"""The Mask: a weight that stays sparse through training, with torch's own hooks and nothing wrapped or patched.

Kept sparse: every subclass of `torch.optim.Optimizer`, fused, foreach, capturable and compiled ones too; copies, loads,
casts, averages, DDP and FSDP2, under which a mask is a DTensor sharded as its weight is. The hooks run between the
graphs of `torch.compile`, so a step compiles with graph breaks there; torch's own optimisers break the graph as well,
and `fullgraph=True` over a step is impossible with or without masks.

A mask belongs to a parameter and to its places. A parameter that is assigned to another module takes its mask along;
one that is assigned to a masked place is masked; each of several tied ones is masked by itself once they are untied,
with a warning. A mask is no buffer, so what walks buffers (averages, DDP, `to_empty`) leaves it alone.

Refused at the next step of an optimiser that has its parameters: a module that has lost its masked one (FSDP1,
parametrisations registered after pruning). Steps of other models pay one comparison of their own parameters.

Not seen, since no optimiser here steps the parameter: separate master copies and functional optimisers. Call `enforce`
after their step, and `twofour.check` tells when it was forgotten. State that 8-bit optimisers hold in codes or tensor
subclasses is left alone.
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

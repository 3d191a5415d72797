"""What surrounds a call: modes that follow its operators, and derivatives that travel with a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from twofour.errors import KernelError, TwofourError, explained

STAND_INS = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)
"""Modes in which a tensor may have no memory, or in which what is written through an address is lost."""

STRANGE = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""What torch raises where it meets a tensor or a mode that an operation was not written for."""


MEMORYLESS = (
    "a tensor without memory of its own (functional, fake, zero, freed, or its storage shrunk)",
    "pass a plain tensor with its values",
)
"""What such a tensor is, and what to do."""


def by_operators() -> bool:
    """Tell whether something follows a call operator by operator: torch.compile, jit.trace, make_fx, a fake mode.

    None of them sees what is written through an address, so a call then goes through its registered operator.
    """
    return is_compiling() or _is_tracing() or _len_torch_dispatch_stack() > 0


@contextmanager
def followed() -> Iterator[None]:
    """Say of an error of torch inside a registered operator that what follows the call cannot follow this.

    Raises:
        KernelError: A mode took fake tensors alone, or has no rule for the operator.
    """
    try:
        yield
    except TwofourError:
        raise
    except STRANGE as error:
        raise KernelError(
            "what follows this call operator by operator cannot follow a compiled layer",
            got=explained(error),
            wanted="torch.compile, torch.export, make_fx, or a mode that takes the layer's weights with the input",
            remedy="leave the mode for the call; FakeTensorMode(allow_non_fake_inputs=True) takes plain weights",
        ) from error


HALVES = (torch.bfloat16, torch.float16)
"""What autocast computes in."""


def is_autocast(device: str) -> bool:
    """Tell whether `torch.autocast` is at work on a device; where there are shapes alone, on "meta", there is none."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Return a block in which a device has no autocast; where it is off, torch.export sees no block at all."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext()


def from_autocast(x: Any, reads: Sequence[torch.dtype]) -> Tensor | None:
    """Return an operand that autocast made in a type that is read, float32 where that is; None: autocast made none.

    Callers ask where they would refuse the operand, so that it costs nothing elsewhere.
    """
    if not isinstance(x, Tensor) or x.dtype not in HALVES or x.dtype in reads or not is_autocast(x.device.type):
        return None
    return x.to(torch.float32 if torch.float32 in reads else reads[0])


def has_tangent(x: Tensor) -> bool:
    """Tell whether forward-mode differentiation follows a tensor; outside of it this costs one comparison."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def plain(call: str, *operands: Tensor | None) -> list[Any]:
    """Return operands whose memory holds their numbers: a view that torch negates on reading is written out.

    Raises:
        KernelError: An operand is no plain tensor, or forward-mode differentiation follows it; `call` is named.
    """
    for x in operands:
        if x is not None and (odd := _odd(x)) is not None:
            raise KernelError(
                f"{call} cannot read an operand", got=odd[0], wanted="plain dense tensors on the CPU", remedy=odd[1]
            )
    return [x.resolve_neg() if x is not None and x.is_neg() else x for x in operands]


def _odd(x: Any) -> tuple[str, str] | None:
    if type(x) is Tensor and x.layout is torch.strided and not x.is_nested and forward_ad._current_level < 0:
        if peek_interpreter_stack() is not None:
            return unreadable(x)
        return memoryless(x)  # a copy that torch makes of it would read at the null address
    if (odd := unreadable(x)) is not None:
        return odd
    if has_tangent(x):
        return "a tensor with a tangent (torch.autograd.forward_ad)", "differentiate the masked model instead"
    return None


def unreadable(x: Any) -> tuple[str, str] | None:
    """Return what an input is that has no numbers to read at an address, and what to do with it; None: it has."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__module__}.{type(x).__name__}", "pass a tensor: torch.as_tensor(x)"
    if is_functorch_wrapped_tensor(x):
        whole = "call the model on the whole batch: its layers take any number of leading axes"
        return "a tensor inside torch.vmap or another transform of torch.func", whole
    if x.is_nested:
        return "a nested tensor", "pad it: x.to_padded_tensor(0.0)"
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
        return f"a {type(x).__name__}, which wraps tensors", "pass the plain tensor behind it"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}", "make it dense: x.to_dense()"
    return None


def out_of_reach(x: Tensor) -> tuple[str, str] | None:
    """Return what keeps native code that has no registered operator from a tensor's numbers, and what to do; or None.

    Beside what is `unreadable`: modes in which tensors are stand-ins, and tensors whose memory is not there.
    """
    if is_compiling():  # torch.compile leaves its graph for such a call
        return None
    if _is_tracing() or (_len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(key) for key in STAND_INS)):
        return "a call that torch follows operator by operator", "make the call outside of tracing and of torch's modes"
    if (odd := unreadable(x.detach() if isinstance(x, Tensor) else x)) is not None:
        return odd
    if not x.is_meta and memoryless(x) is not None:
        return MEMORYLESS
    return MEMORYLESS if x.is_cpu and x.numel() and x.untyped_storage().nbytes() < _end(x) else None


def memoryless(x: Tensor) -> tuple[str, str] | None:
    """Return what a strided tensor is that has no address, and what to do; None: it has one. It takes some 100 ns."""
    return None if x.data_ptr() or not x.numel() else MEMORYLESS


def _end(x: Tensor) -> int:
    """Return at which byte of its storage a tensor that is not empty ends."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (int(x.storage_offset()) + last + 1) * x.element_size()

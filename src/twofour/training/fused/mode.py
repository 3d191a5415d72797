"""The mode that takes functions out of torch's hands, and how it is put over the forward pass of a model."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from twofour.measure.chooser import race
from twofour.native.surroundings import by_operators
from twofour.training.fused.functions import SERVED, Call, Left

_log = logging.getLogger("twofour.training")

POLICIES = ("measured", "always", "never")
"""Those of `Fused`."""
LEAST = 1 << 16
"""Numbers of an answer from which a call is measured: below, what it saves is less than a call from Python costs."""
MOST = 8
"""Shapes of a function and a type that are measured, so that batches of ever new shapes do not stall: later ones run
as the nearest of them does."""
_FUSED = "_twofour_fused"
"""Attribute of a model whose forward pass the mode is put over: its `Fused`."""
_OWN = "_twofour_called"
"""Attribute of the class that such a model has in the meantime: its own."""


@dataclass(frozen=True)
class Choice:
    """What runs a function of one shape.

    Attributes:
        ours: Whether ours runs.
        torch_ms: Milliseconds of torch's forward and backward pass together.
        ours_ms: The same of ours.
        at: The call that was measured in its stead, "": itself.
    """

    ours: bool
    torch_ms: float
    ours_ms: float
    at: str = ""

    def __str__(self) -> str:
        ratio = self.torch_ms / self.ours_ms
        why = f"{ratio:.2f} times as fast" if self.ours else f"ours would take {1 / ratio:.2f} times as long"
        why += f", measured at {self.at}" if self.at else ""
        return f"{'fused' if self.ours else 'torch'} (torch {self.torch_ms:.2f}, fused {self.ours_ms:.2f}, {why})"


class Fused(TorchFunctionMode):
    """Serves functions of the forward pass of one model; what it chooses is neither copied nor pickled.

    Attributes:
        policy: "measured": what is faster here, in the first call of about a shape; "always": ours,
            unmeasured; "never".
        seconds: Time box of measuring one shape.
        owners: Titles of what has put it on.
        choices: The call as text, rows and keys to the nearest power of two -> what runs.
        left: What is left to torch -> the reason: calls, and modules by their names.
    """

    def __init__(self, policy: str, seconds: float) -> None:
        super().__init__()
        self.policy, self.seconds = policy, seconds
        self.owners: set[str] = set()
        self.choices: dict[str, Choice] = {}
        self.left: dict[str, str] = {}
        self._known: dict[tuple[str, torch.dtype], dict[str, tuple[str, tuple[int, ...]]]] = {}
        self._local = threading.local()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or ours in its place."""
        kwargs = kwargs or {}
        serve = SERVED.get(func)
        if serve is not None and _undisturbed():
            try:
                call = serve(*args, **kwargs)
            except TypeError:  # arguments that torch is to complain about
                call = None
            if isinstance(call, Left):
                self.leave_out(call)
            elif call is not None and self._takes(call):
                return call.ours(*call.operands)
        return func(*args, **kwargs)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve on this thread, however what is inside ends: by Ctrl-C and SystemExit too, which run no hooks."""
        if getattr(self._local, "depth", 0):  # a model that calls itself
            yield
            return
        self._local.depth = 1
        try:
            self.__enter__()
            yield
        finally:
            self._local.depth = 0
            self._drop()

    def _drop(self) -> None:
        """Take the mode off this thread; modes that were left above it stay."""
        above = []
        while torch._C._len_torch_function_stack() > 0 and (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def _takes(self, call: Call) -> bool:
        """Whether ours runs."""
        if self.policy != "measured":
            return self.policy == "always"
        if call.operands[0].numel() < LEAST or call.always:
            return call.operands[0].numel() >= LEAST
        if (key := str(call)) not in self.choices:
            self.choices[key] = self._chosen(key, call)
            _log.info("%s: %s", key, self.choices[key])
        return self.choices[key].ours

    def _chosen(self, key: str, call: Call) -> Choice:
        """Measure a call, or choose as for the nearest one once enough were measured."""
        known = self._known.setdefault((call.name, call.operands[0].dtype), {})
        if len(known) < MOST:
            known[key] = call.form, call.sizes
            return _measured(call, self.seconds)
        at = min(known, key=lambda one: (known[one][0] != call.form, _apart(known[one][1], call.sizes)))
        return replace(self.choices[at], at=at)

    def leave_out(self, left: Left) -> None:
        """Say once what torch runs, and why."""
        if left.call not in self.left:
            self.left[left.call] = left.why
            _log.info("%s: torch, since %s", left.call, left.why)

    def functions(self) -> dict[str, str]:
        """Return what runs each function, and what is left to torch, as a plan says it."""
        chosen = {call: str(choice) for call, choice in self.choices.items()}
        return chosen | {call: f"torch: {why}" for call, why in self.left.items()}

    def __getstate__(self) -> dict[str, Any]:  # what was chosen here holds for this machine
        return {"policy": self.policy, "seconds": self.seconds, "owners": set(self.owners), "left": dict(self.left)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = vars(Fused(state["policy"], state["seconds"]))
        vars(self).update(fresh, owners=state["owners"], left=state.get("left", {}))


def followed_by_a_backward_pass() -> bool:
    """Whether a plain backward pass follows what is computed now: no transform of functorch, and nothing is traced."""
    plainly = torch.is_grad_enabled() and not by_operators() and forward_ad._current_level < 0
    return plainly and peek_interpreter_stack() is None


def _undisturbed() -> bool:
    """Whether the mode may serve a function.

    Checkpointing looks for the same saved tensors when it computes anew, when the mode may not be there: it, and what
    else exchanges saved tensors, leaves hooks for them.
    """
    return followed_by_a_backward_pass() and _top_saved_tensors_default_hooks(True) is None


def _measured(call: Call, seconds: float) -> Choice:
    """Time forward and backward pass of both, interleaved."""
    operands = [t.detach().requires_grad_(t.requires_grad) for t in call.operands]
    leaves = [t for t in operands if t.requires_grad]
    # Dropout draws numbers, as often as there is time for.
    with torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        upstream = call.theirs(*operands).detach()
        runs = {name: partial(_run, way, operands, leaves, upstream) for name, way in _ways(call).items()}
        taken, _ = race(runs, seconds=seconds, repeats=20)
    return Choice(taken["ours"] < taken["torch"], 1e3 * taken["torch"], 1e3 * taken["ours"])


def _apart(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


def _ways(call: Call) -> dict[str, Callable[..., Tensor]]:
    return {"torch": call.theirs, "ours": call.ours}


def _run(way: Callable[..., Tensor], operands: list[Tensor], leaves: list[Tensor], upstream: Tensor) -> object:
    return torch.autograd.grad(way(*operands), leaves, upstream)


def fused_of(model: nn.Module) -> Fused | None:
    """Return the mode that is put over the forward pass of a model, if one is."""
    found = model.__dict__.get(_FUSED)
    return found if isinstance(found, Fused) else None


def put_on(model: nn.Module, title: str, policy: str, seconds: float) -> None:
    """Serve functions of a model's forward pass from now on.

    Args:
        model: It calls functions between its layers; one without children calls none.
        title: What puts it on, and takes it off.
        policy: One of `POLICIES`.
        seconds: Time box of measuring one shape.
    """
    fused = fused_of(model)
    if policy == "never" or next(model.children(), None) is None:
        return
    if fused is None:
        model.__dict__[_FUSED] = fused = Fused(policy, seconds)
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                fused.leave_out(
                    Left(name or "(model)", "nn.MultiheadAttention takes modes of torch off while it computes")
                )
        model.__class__ = _over(type(model))
    fused.owners.add(title)


def take_off(model: nn.Module, title: str) -> None:
    """Undo `put_on`, also on a copy; nothing is left behind by the last owner."""
    fused = fused_of(model)
    if fused is None or title not in fused.owners:
        return
    fused.owners.remove(title)
    if fused.owners:
        return
    del model.__dict__[_FUSED]
    if _OWN in vars(type(model)):  # else a class that was put over it since keeps ours below, which does nothing now
        model.__class__ = getattr(type(model), _OWN)


def state_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what was chosen for a model, as a checkpoint holds it."""
    fused = fused_of(model)
    return {} if fused is None else {call: asdict(choice) for call, choice in fused.choices.items()}


def load_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Choose as where `state_of` was taken, at the shapes that it knows."""
    if (fused := fused_of(model)) is not None:
        fused.choices.update({call: Choice(**choice) for call, choice in state.items()})


def apart() -> AbstractContextManager[Any]:
    """What keeps the mode out of a layer's own work, whose every look at a tensor would ask it."""
    if torch.compiler.is_compiling():
        return nullcontext()
    depth = torch._C._len_torch_function_stack()
    inside = depth > 0 and isinstance(torch._C._get_function_stack_at(depth - 1), Fused)
    return torch._C.DisableTorchFunction() if inside else nullcontext()


class _Called(nn.Module):
    """A model while the mode is put over its calls. Hooks would not see a forward pass end that is interrupted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._compiled_call_impl is not None or (mode := fused_of(self)) is None:
            return super().__call__(*args, **kwargs)
        with mode.serving():
            return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # the class is made on demand: none to find by its name
        return _blank, (getattr(type(self), _OWN),), self.__getstate__()


@cache
def _over(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that goes by the same name, by which transformers say what a folder holds."""
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (_Called, base), {**names, _OWN: base})


def _blank(base: type[nn.Module]) -> nn.Module:
    over = _over(base)
    return over.__new__(over)

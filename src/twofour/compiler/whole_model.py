"""The forward of a model that runs as one graph, and of the layers beside it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from twofour.capture import Graph, Guard, bind, is_hugging_face, said_by_config
from twofour.compiler.agreement import AGREEMENT, Agreement
from twofour.compiler.autocast import in_own_type
from twofour.compiler.held import CHANGED, HOOKS, TRAINING, Held
from twofour.compiler.ragged import RaggedProgram
from twofour.errors import KernelError
from twofour.graph import Executor
from twofour.kernels.operator import inference_only
from twofour.native.surroundings import by_operators
from twofour.quantization.reference import at_work

logger = logging.getLogger("twofour.compiler")


def hooked(model: nn.Module) -> list[str]:
    """Return the inner modules with forward hooks, which run when their module is called: a graph calls none."""
    return [f"`{name}`" for name, module in model.named_modules() if name and run_hooks(_hooks(module))]


def _hooks(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks


def run_hooks(hooks: Iterable[Mapping[int, Any]]) -> bool:
    """Tell whether one of them does something in every call.

    Those with which transformers 5 collects hidden states stay on a model that was once asked for them, and do nothing
    until it is asked again: such a call has an argument that no graph holds for.
    """
    filled = filter(None, hooks)
    return any(getattr(hook, "__module__", "") != _COLLECTING for held in filled for hook in list(held.values()))


def all_hooks(model: nn.Module) -> list[Mapping[int, Any]]:
    """Return the forward hooks of every inner module: torch keeps these mappings and fills them when one is added."""
    return [hooks for name, module in model.named_modules() if name for hooks in _hooks(module)]


def layers_alone(model: nn.Module) -> bool:
    """Tell whether no engine but the layers may run: what follows a call, or vmap and its like, must see them.

    And where `quantization.in_whole_numbers` asks the layers for their reference.
    """
    followed = by_operators() or peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return followed or at_work(model)


_COLLECTING = "transformers.utils.output_capturing"

SERVED = 64
"""Forms of calls that are known to be served; then they are looked at again."""


def _lie(values: Sequence[Any], positional: int, names: tuple[str, ...]) -> Any:
    """Return all that a graph could ask of a call of plain tensors, which is how they lie; None of any other call.

    Binding a call of one tensor to a signature and asking a graph's guards takes 24 us on an Ice Lake Xeon, this 3.
    """
    if not all(type(value) is Tensor and value.layout is torch.strided and value.is_cpu for value in values):
        return None
    if any(value.is_nested for value in values):
        return None
    lie = [(value.shape, value.dtype, value.stride(), bool(value.numel())) for value in values]
    return positional, names, tuple(lie)


class WholeModel:
    """The forward of a model compiled as a graph; calls the graph does not hold for run layer by layer.

    Args:
        model: The model with compiled layers.
        guard: Which calls the graph holds for.
        program: The rewritten graph.
        graph: As captured: the structure of its outputs.

    Attributes:
        agreement: How far it may be from the layers.
        written: Name of the argument, a mapping, that the model writes its outputs into and answers with; or none.
        beside: Entries of that mapping that a call may have too, with these values, of tensors zeros (`features`).
        complete: Returns a call with the inputs that it leaves out, or None (`left_out`); None where all are needed.
        ragged: The program that runs batches with padding on their real tokens; None where the graph has none.
    """

    def __init__(self, model: nn.Module, guard: Guard, program: Executor, graph: Graph) -> None:
        self.model, self.guard, self.program, self.outputs = model, guard, program, graph.outputs
        self.agreement = Agreement(model, AGREEMENT[torch.float32])
        self.written: tuple[str, ...] = ()
        self.beside: dict[str, Any] = {}
        self.complete: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None
        self.ragged: RaggedProgram | None = None
        self._said: set[str] = set()
        self._served: dict[Any, list[Any]] = {}
        self._hooks = all_hooks(model)
        self._held: Held | None = Held(model, self._hooks)
        self._changed = ""
        self._configured = said_by_config(model) if is_hugging_face(model) else {}
        self.__signature__ = own_signature(model)

    @property
    def __code__(self) -> CodeType:
        """Code of the model's own forward, which torch.export names its frames by."""
        return inspect.unwrap(type(self.model).forward).__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns."""
        kind = type(self.model)
        if layers_alone(self.model):
            return in_own_type(self.model, partial(kind.forward, self.model), args, kwargs)
        own = self.own()
        values = [*args, *kwargs.values()]
        like = None if own or self.written else _lie(values, len(args), tuple(kwargs))
        order = self._served.get(like) if like is not None else None
        if order is not None and not (torch.is_grad_enabled() and any(value.requires_grad for value in values)):
            try:
                return self.outputs.value(self.run([values[at] if type(at) is int else at.clone() for at in order]))
            except KernelError as error:
                return self._refused(error, args, kwargs)
        if torch.is_autocast_enabled("cpu"):  # a served call asks in its program
            return in_own_type(self.model, self, args, kwargs)
        given = bind(_signature(kind), self.model, args, kwargs)
        leaves = None if own else self._leaves(given)
        if leaves is not None and like is not None:
            self._remember(like, values, leaves)
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves or ()):
            raise inference_only()
        if leaves is not None:
            try:
                return self.answer(given, self.outputs.value(self.run(leaves)))
            except KernelError as error:
                return self._refused(error, args, kwargs)
        name, why = ("", own) if own else self._unlike(given)  # before the model writes into what it was given
        answer = kind.forward(self.model, *args, **kwargs)
        self._say(own, name, why)  # of a call that the model itself refuses its own error says why
        return answer

    def _leaves(self, given: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of a call, what says nothing left out; None where the graph does not hold for it."""
        leaves = self.guard.leaves(given)
        if leaves is None and self.beside and isinstance(given.get(self.written[0]), Mapping):
            leaves = self.guard.leaves({**given, self.written[0]: self._without(given[self.written[0]])})
        whole = self.complete(given) if leaves is None and self.complete is not None else None
        return leaves if whole is None else self.guard.leaves(whole)

    def _without(self, features: Mapping[str, Any]) -> dict[str, Any]:
        beside = self.beside
        return {
            key: value for key, value in features.items() if key not in beside or not _says_nothing(value, beside[key])
        }

    def run(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the output leaves for leaves that the graph holds for."""
        packed = None if self.ragged is None else self.ragged.leaves(leaves)
        if packed is None or self.ragged is None:
            return self.program(*leaves)
        return self.ragged.program(*packed)

    def _refused(self, error: KernelError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layers answer to values that a kernel of the graph refuses, or raise what they raise.

        An index out of range is an IndexError then, as of the model itself, and an operand's error names its layer.
        """
        answer = in_own_type(self.model, partial(type(self.model).forward, self.model), args, kwargs)
        if error.what not in self._said:
            self._said.add(error.what)
            logger.warning("a call that the graph refuses (%s) runs layer by layer (said once)", error.what)
        return answer

    def own(self) -> str:
        """Return why the model's own forward runs whatever it is given, "" where the graph may."""
        if self._held is None:  # a copy looks at its own modules
            self._hooks = all_hooks(self.model)
            self._held = Held(self.model, self._hooks)
        if self._configured and (said := said_by_config(self.model)) != self._configured:
            name = next(name for name in {**self._configured, **said} if said.get(name) != self._configured.get(name))
            return f"with another `config.{name.lstrip('_')}` than was compiled"
        seen = self._held.look()
        if not seen and not self._changed:
            return ""
        if self.model.training:
            return "in training mode"
        if seen & HOOKS and run_hooks(self._hooks):
            return "with forward hooks"
        return self._after_a_change(self._held, seen)

    def look_again(self) -> None:
        """Take the model as it is now for what the graph was made of: who changed it knows that it answers so."""
        self._held = None

    def _remember(self, like: Any, values: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Note that the graph holds for calls that lie as this one, and in which order it takes their tensors.

        What was made for an input that they leave out follows from their sizes: a copy of it is kept, and copied for
        each call, since a model may answer with it, and the caller write to its answer. Ids of int32 that the
        graph takes as int64 are converted each time.
        """
        taken = {id(leaf) for leaf in leaves}
        if any(value.dtype is torch.int32 and id(value) not in taken for value in values):
            return
        places = {id(value): place for place, value in enumerate(values)}
        made = [leaf for leaf in leaves if id(leaf) not in places]
        kept = not made or (self.complete is not None and all(isinstance(leaf, Tensor) for leaf in made))
        if len(places) == len(values) and kept:
            if len(self._served) >= SERVED:
                self._served = {}
            self._served[like] = [places[id(one)] if id(one) in places else one.clone() for one in leaves]

    def answer(self, given: Mapping[str, Any], found: Any) -> Any:
        """Return what the graph found, in the mapping of the call's own where the model answers with that."""
        for name in self.written:
            given[name].update(found)
            return given[name]
        return found

    def _after_a_change(self, held: Held, seen: int) -> str:
        """Return why the graph is not what the model has become, "" where it still is."""
        if seen & TRAINING:
            return f"with `{held.training()}` in training mode"
        if seen & CHANGED:
            self._changed = self._changed or held.changed()
        return f"after a change of `{self._changed}`, of which the graph has a copy," if self._changed else ""

    def _say(self, own: str, name: str, why: str) -> None:
        """Log, once for each reason, why a call runs layer by layer."""
        if own + name not in self._said:
            self._said.add(own + name)
            shown = own or f"with `{name}` ({why})"
            logger.warning("a call %s runs layer by layer (said once)", shown)

    def _unlike(self, given: Mapping[str, Any]) -> tuple[str, str]:
        """Return which argument of a call the graph does not hold for, and why, of those that the call gives."""
        whole = None if self.complete is None else self.complete(given)
        name, why = self.guard.unlike(given if whole is None else whole, of=given)
        if name in given and name not in self.guard.names and name not in self.__signature__.parameters:
            why = f"{why.removesuffix(' or with its default')}: forward names no such argument"
        return name, why

    def __getstate__(self) -> dict[str, Any]:
        if self._held is not None:
            self._changed = self._changed or self._held.changed()
        mine = {"_hooks": [], "_held": None, "__signature__": None, "_served": {}}  # a copy has its own modules
        return {**self.__dict__, **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__signature__ = own_signature(self.model)


def _says_nothing(value: Any, known: Any) -> bool:
    """Tell whether an entry is one that is known to say nothing: zeros of ids say the same in every width."""
    if isinstance(known, Tensor) and isinstance(value, Tensor):
        alike = value.dtype is known.dtype or {value.dtype, known.dtype} == {torch.int32, torch.int64}
        return alike and not value.any()
    return type(value) is type(known) and not isinstance(value, Tensor) and bool(value == known)


def own_signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of a model's own forward: torch.export reads it off whatever stands in its place."""
    signature = _signature(type(model))
    return signature.replace(parameters=list(signature.parameters.values())[1:])


_signatures: dict[type, inspect.Signature] = {}


def _signature(kind: type) -> inspect.Signature:
    if kind not in _signatures:
        _signatures[kind] = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return _signatures[kind]


def by_layers(model: nn.Module, given: Mapping[str, Any], forward: Callable[..., Any] | None = None) -> Any:
    """Return what the forward of the model's class answers, or `forward`, with what a call gives to its parameters."""
    signature = _signature(type(model))
    known = {name: value for name, value in given.items() if name in signature.parameters}
    extra = {name: value for name, value in given.items() if name not in known}
    bound = signature.bind_partial(model)
    bound.arguments.update(known)
    if forward is not None:
        return forward(*bound.args[1:], **bound.kwargs, **extra)
    return type(model).forward(*bound.args, **bound.kwargs, **extra)

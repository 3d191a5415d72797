"""compile(..., graph="inductor"): torch's Inductor around the compiled layers, where it is the fastest engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from twofour import calls
from twofour.calls import Example
from twofour.capture import TRACING, Graph, arguments
from twofour.compiler.agreement import agreement, amount, difference
from twofour.compiler.autocast import in_own_type
from twofour.compiler.graph import TIE, capture_model, impossible
from twofour.compiler.graph_report import GraphReport
from twofour.compiler.layer import PreparedWeights
from twofour.compiler.plan import Plan
from twofour.compiler.terms import Terms
from twofour.compiler.whole_model import all_hooks, by_layers, layers_alone, own_signature
from twofour.errors import cut
from twofour.kernels.operator import inference_only
from twofour.measure.chooser import milliseconds

logger = logging.getLogger("twofour.compiler")

_NONE = PreparedWeights(())


def fastest_engine(
    fast: nn.Module,
    plan: Plan,
    example: Example,
    terms: Terms,
    graph: bool | str,
    original: nn.Module | None = None,
    *,
    stored: Graph | None = None,
) -> Plan:
    """Let `fast` run on the engine that `graph` allows and that is fastest on the example; returns the plan with why.

    Args:
        fast: The model with compiled layers; its instance gets a `forward` of its own.
        plan: What was decided for the layers.
        example: That of `compile`.
        terms: What held for every layer.
        graph: True or "auto": the rewritten graph or the layers; "inductor": or Inductor around the layers.
        original: As in `capture_model`.
        stored: As in `capture_model`.
    """
    example = example.copy()
    given = arguments(fast, example.args, example.kwargs)
    with TRACING:
        found = capture_model(fast, plan, example, terms, original, asked=graph != "auto", stored=stored)
        if graph != "inductor" or impossible(fast, given):
            return found
        return _inductor(fast, plan, found, given)


def _inductor(fast: nn.Module, plan: Plan, found: Plan, given: Mapping[str, Any]) -> Plan:
    account = found.account or GraphReport("layers", "")
    try:
        engine = InductorModel(fast)
        error, times = _tried(engine, given, {**account.engine_ms})
    except Exception as failure:  # Inductor, the C++ compiler and what they run raise whatever they like
        said = cut(" ".join(str(failure).split("Set TORCH")[0].split()), 300)
        reason = f"Inductor failed: {type(failure).__name__}: {said}"
        logger.warning("Inductor is not used: %s", reason)
        return replace(found, account=replace(account, reason=f"{account.reason}; {reason}"))
    allowed = agreement(fast, plan.dtype, tree_leaves(given), lambda: tree_leaves(by_layers(fast, calls.fresh(given))))
    if not error <= allowed.allowed:
        reason = f"Inductor differs from the layers {amount(error)} on the example"
        logger.warning("Inductor is not used: %s", reason)
        return replace(found, account=replace(account, reason=f"{account.reason}; {reason}"))
    others = min(ms for name, ms in times.items() if name != "inductor")
    if TIE * times["inductor"] >= others:
        reason = f"{account.reason}; Inductor is not faster"
        return replace(found, account=replace(account, reason=reason, engine_ms=times))
    object.__setattr__(fast, "forward", engine)
    reason = "Inductor around the compiled layers is the fastest; what it does not hold for is compiled at its call"
    return replace(plan, account=replace(account, engine="inductor", reason=reason, engine_ms=times))


def _tried(engine: InductorModel, given: Mapping[str, Any], known: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Compile and time; return the difference from the layers and the milliseconds by engine.

    The engine in place is timed again beside Inductor; what has lost to it keeps its time.
    """
    model = engine.model
    graph = model.__dict__.get("forward")
    engines: dict[str, Callable[[], object]] = {"layers": lambda: by_layers(model, calls.fresh(given))}
    if graph is not None:
        engines["graph"] = lambda: by_layers(model, calls.fresh(given), graph)
    engines["inductor"] = lambda: by_layers(model, calls.fresh(given), engine)
    with torch.no_grad():
        logger.info("Inductor compiles the model; this takes up to a minute")
        found = tree_leaves(by_layers(model, calls.fresh(given), engine))
        want = tree_leaves(by_layers(model, calls.fresh(given)))
        engine.ready = True
        return difference(found, want), known | milliseconds(engines)


class InductorModel:
    """The forward of a model compiled by Inductor; calls unlike those before are compiled when they come.

    Copies and files carry no machine code: they compile again at their first call.

    Args:
        model: The model with compiled layers, which are single operators to Inductor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ready, self._said = False, False
        self._hooks: list[Mapping[int, Any]] | None = None
        self._run: Callable[..., Any] | None = None
        self.__signature__ = own_signature(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model's own forward returns."""
        return in_own_type(self.model, self._call, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = type(self.model).forward
        if layers_alone(self.model):
            return forward(self.model, *args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise inference_only()
        if self._hooks is None:
            self._hooks = all_hooks(self.model)
        if any(self._hooks):  # added since: Inductor's code would not run them
            if not self._said:
                self._said = True
                logger.warning("a call with forward hooks runs layer by layer (said once)")
            return forward(self.model, *args, **kwargs)
        if self._run is None:
            _keep_sizes(self.model)
            self._run = torch.compile(forward, backend=self._compile, dynamic=True)
        with torch.inference_mode(False), torch.no_grad():  # modes are guarded: one mode, one compilation
            return self._run(self.model, *args, **kwargs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.ready:
            logger.warning("Inductor compiles the model for another kind of call; this takes up to a minute")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own deprecations: whatever fails raises
            return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "ready": True, "_said": False, "_hooks": None, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__signature__ = own_signature(self.model)


def _keep_sizes(model: nn.Module) -> None:
    """Tell dynamo that weights keep their size; else one that happens to equal the token count is guarded with it."""
    weights = [tensor for module in model.modules() for tensor in getattr(module, "prepared", _NONE).tensors]
    for tensor in weights:
        for held in (tensor, tensor._base):
            if held is not None and not held.is_mkldnn:
                torch._dynamo.mark_static(held)

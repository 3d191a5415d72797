"""The compiled LSTM, GRU and RNN, and their cells: prepared weights, all steps of a direction in one native call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from twofour.compiler.layer import PreparedWeights
from twofour.compiler.unpacked import Reads, WeightedLayer, unwritable
from twofour.errors import KernelError
from twofour.kernels.base import FLOATS
from twofour.kernels.dispatch import DispatchTable, read_dispatch
from twofour.kernels.operator import inference_only
from twofour.kernels.recurrent import Direction, Factor, RecurrentProblem, recurrent, through_operator
from twofour.layers import CompiledLayer
from twofour.native.surroundings import STRANGE, by_operators, from_autocast, plain, unreadable
from twofour.patterns import Pattern

State = tuple[Tensor, Tensor | None]
"""h and, of an LSTM, c."""


_PAIRS = tuple, list
"""What a pair of states may be; `tuple | list` would be a type made anew at every call."""

_AXES = "(steps, batch, {0}) or (steps, {0})", "(batch, steps, {0}) or (steps, {0})"
"""Axes of an input, by `batch_first`."""


def _as_floats(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def _ready(x: Tensor | None) -> bool:
    """Tell whether a native call can take a tensor as it is, without the questions that `plain` asks of it."""
    return x is None or (
        type(x) is Tensor
        and x.layout is torch.strided
        and x.dtype is torch.float32
        and x.is_contiguous()
        and not (x.requires_grad or x.is_neg())
    )


def _rearranged(state: State, order: Tensor | None) -> State:
    """Return states with their sequences in another order, None where they stay."""
    if order is None:
        return state
    return state[0].index_select(1, order), None if state[1] is None else state[1].index_select(1, order)


class HeldWeight(WeightedLayer):
    """One weight of a recurrent layer, as other code sees it.

    Args:
        layer: Name of the layer, for messages.
        shape: (out, in).
        prepared: The weight in each layout that its kernels read.
        dispatch: Which product serves how many rows.
        pattern: What it obeys, None where it is dense.
        dtype: dtype of the weight in the model.
    """

    def __init__(
        self,
        layer: str,
        shape: tuple[int, int],
        prepared: PreparedWeights,
        dispatch: DispatchTable,
        pattern: Pattern | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.name, self.shape, self.prepared = layer, shape, prepared
        self.pattern, self.weight_dtype = pattern, dtype
        self.dispatch_text = dispatch.to_text()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight in the model that was compiled."""
        return self.shape

    def factor(self, bias: Tensor | None) -> Factor:
        """Return the weight with its bias, as the native call takes it."""
        return Factor(read_dispatch(self.dispatch_text), self.prepared.weights, bias)


class RecurrentLayer(CompiledLayer):
    """A recurrent layer for inference; its weights are no parameters, its biases are, by torch's names.

    Args:
        name: Name of the layer in its model, for messages.
        problem: What is computed.
        weights: Each weight by its name, in the order of `problem.shapes`.
        biases: float32 (out,) by their names, those of the inputs and of the states of each direction; or none.
        reads: What an input may be: float32, or bfloat16, which is widened.
    """

    def __init__(
        self,
        name: str,
        problem: RecurrentProblem,
        weights: dict[str, HeldWeight],
        biases: dict[str, Tensor],
        reads: tuple[torch.dtype, ...] = FLOATS[:1],
    ) -> None:
        super().__init__()
        self.name, self.problem, self.reads = name, problem, reads
        self.__dict__["held"] = weights  # no modules of the model: they have no state
        self.weight_names, self.bias_names = tuple(weights), tuple(biases)
        self.weight_dtype = next(one.weight_dtype for one in weights.values())
        for bias, values in biases.items():
            self.register_parameter(bias, nn.Parameter(values.detach().float().clone(), requires_grad=False))
        self._directions: tuple[tuple[tuple[str, Tensor | None], ...], tuple[Direction, ...]] | None = None
        self.widths = problem.width, problem.hidden if problem.cell == "lstm" else None

    held: dict[str, HeldWeight]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in every layout."""
        return sum(one.prepared.nbytes for one in self.held.values())

    @property
    def weight_reads(self) -> Reads:
        """What was said of its weights being read; layers of one model share it."""
        return next(iter(self.held.values())).weight_reads

    @weight_reads.setter
    def weight_reads(self, reads: Reads) -> None:
        for one in self.held.values():
            one.weight_reads = reads

    def directions(self) -> tuple[Direction, ...]:
        """Return the weights of each layer and direction with the biases that the layer has now."""
        known, parameters = self._directions, self._parameters
        if known is not None:
            for name, bias in known[0]:
                if parameters[name] is not bias:
                    break
            else:
                return known[1]
        biases = tuple((name, parameters[name]) for name in self.bias_names)
        self._directions = biases, tuple(self._made([bias for _, bias in biases]))
        return self._directions[1]

    def _made(self, biases: Sequence[Tensor | None]) -> Iterator[Direction]:
        each, weights = 3 if self.problem.projected else 2, list(self.held.values())
        for way in range(len(weights) // each):
            first, second, *third = weights[way * each : (way + 1) * each]
            of_input, of_state = biases[2 * way : 2 * way + 2] if biases else (None, None)
            projection = third[0].factor(None) if third else None
            yield Direction(first.factor(of_input), second.factor(of_state), projection)

    def _run(self, x: Tensor, batch: int, sizes: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Run steps (tokens, in) or (steps, batch, in); states are (layers * directions, batch, ...)."""
        h, c = state or (None, None)
        dtype, run = x.dtype, recurrent
        if by_operators():
            x, h, c, run = x.float().contiguous(), _as_floats(h), _as_floats(c), through_operator
        elif not (_ready(x) and _ready(h) and _ready(c)) or forward_ad._current_level >= 0 or peek_interpreter_stack():
            if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, h, c)):
                raise inference_only()
            x, h, c = plain("a recurrent layer", x, h, c)
            x, h, c = x.float().contiguous(), _as_floats(h), _as_floats(c)
        y, last, kept = run(self.problem, self.directions(), x, batch, sizes, h, c)
        if dtype is torch.float32:
            return y, (last, kept)
        return y.to(dtype), (last.to(dtype), None if kept is None else kept.to(dtype))

    def _require(self, x: Any, axes: tuple[int, ...], wanted: str) -> Tensor:
        """Return an input that fits, in float32 where autocast made it in a type that is not read."""
        fits = isinstance(x, Tensor) and x.ndim in axes and x.shape[-1] == self.problem.inputs
        if not fits or x.dtype not in self.reads or not x.is_cpu:
            if fits and (made := from_autocast(x, self.reads)) is not None and x.is_cpu:
                return made
            dtypes = " or ".join(map(str, self.reads))
            raise self._unfit("input", x, f"{dtypes} {wanted.format(self.problem.inputs)} on cpu")
        return x

    def _require_state(self, given: Any, batch: int, ways: int | None) -> State:
        """Return h and c as they were given, (ways, batch, width) each, or of a cell (batch, width).

        float16 of autocast is made float32.
        """
        h, c, (width, hidden) = given, None, self.widths
        if hidden is not None:
            if not isinstance(given, _PAIRS) or len(given) != 2:
                raise self._unfit("state", given, "(h, c), two tensors")
            h, c = given
            c = self._require_one(c, (batch, hidden) if ways is None else (ways, batch, hidden))
        h = self._require_one(h, (batch, width) if ways is None else (ways, batch, width))
        return h, c

    def _require_one(self, state: Any, shape: tuple[int, ...]) -> Tensor:
        fits = isinstance(state, Tensor) and state.shape == shape and state.is_cpu
        if fits and state.dtype in FLOATS:
            return state
        made = from_autocast(state, FLOATS) if fits else None
        if made is None:
            raise self._unfit("state", state, f"float32 or bfloat16 {shape} on cpu")
        return made

    def _unfit(self, role: str, given: Any, wanted: str) -> KernelError:
        odd = unreadable(given)
        got = odd[0] if odd else f"{given.dtype} {tuple(given.shape)} on {given.device}"
        remedy = odd[1] if odd else "give the layer what the layer of torch takes that it was compiled from"
        what = f"the {role} of a compiled recurrent layer does not fit"
        return KernelError(what, got=got, wanted=wanted, remedy=remedy, layer=self.name)

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("held", {})
        return held[name].weight if name in held else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("held", {}):
            raise unwritable(self.name)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_directions": None}

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        texts = dict.fromkeys(one.dispatch_text for one in self.held.values())
        return f"{self.problem.inputs}, {self.problem.hidden}, cell={self.problem.cell}, kernels={' '.join(texts)}"


class CompiledRecurrent(RecurrentLayer):
    """An LSTM, GRU or RNN for inference, with the calls of torch's.

    Args:
        described: As `RecurrentLayer` takes it.
        batch_first: Whether the input's first axis is the batch.
    """

    def __init__(self, *described: Any, batch_first: bool = False) -> None:
        super().__init__(*described)
        self.batch_first, self.ways = batch_first, self.problem.layers * self.problem.directions

    def flatten_parameters(self) -> None:
        """Do nothing: the weights are prepared already."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Return the states of all steps, and the last ones, as torch.nn.LSTM, GRU and RNN do.

        Args:
            input: (steps, batch, in), (batch, steps, in) where `batch_first`, (steps, in), or a PackedSequence.
            hx: The states before the first step, of an LSTM (h, c); zeros by default. To stream, pass what the call
                before answered.

        Raises:
            KernelError: Shape, dtype or device of an operand do not fit, there is no step, or a gradient is asked for.
        """
        try:
            answer = self._direct(input, hx)
            if answer is not None:
                return answer
            return self._packed(input, hx) if isinstance(input, PackedSequence) else self._padded(input, hx)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        except STRANGE as error:
            if isinstance(input, PackedSequence) or unreadable(input) is None:
                raise
            raise self._unfit("input", input, "a plain tensor") from error

    def _direct(self, x: Any, hx: Any) -> tuple[Tensor, Any] | None:
        """Return what the native call answers that takes the operands as they are; None where something else is asked.

        A step of a small layer takes as long as the questions that `_padded` asks. Here the native call asks for types,
        shapes, strides and devices: of what it refuses, `_padded` says more, or makes it fit.
        """
        lstm = self.widths[1] is not None
        pair: Any = hx if lstm and type(hx) is tuple and len(hx) == 2 else (hx, None)
        h, c = pair
        if (
            type(x) is not Tensor
            or x.dtype is not torch.float32
            or self.batch_first
            or (c is None) is (lstm and h is not None)
        ):
            return None
        if by_operators() or forward_ad._current_level >= 0 or peek_interpreter_stack():
            return None
        graded, shape = torch.is_grad_enabled(), x.shape
        for one in (x,) if h is None else (x, h) if c is None else (x, h, c):
            if type(one) is not Tensor or one.is_neg() or (graded and one.requires_grad):
                return None
        if len(shape) != 3 or shape[0] == 0:
            return None
        try:
            y, last, kept = recurrent(self.problem, self.directions(), x, shape[1], None, h, c)
        except KernelError:
            return None
        return y, last if kept is None else (last, kept)

    def _padded(self, x: Tensor, hx: Any) -> tuple[Tensor, Any]:
        x = self._require(x, (2, 3), _AXES[self.batch_first])
        if x.ndim == 2:
            return self._single(x, hx)
        x = x.transpose(0, 1) if self.batch_first else x
        steps, batch, _ = x.shape
        if steps == 0:
            raise self._unfit("input", x, "one step at least")
        state = None if hx is None else self._require_state(hx, batch, self.ways)
        y, (h, c) = self._run(x, batch, None, state)
        return y.transpose(0, 1) if self.batch_first else y, h if c is None else (h, c)

    def _single(self, x: Tensor, hx: Any) -> tuple[Tensor, Any]:
        """Run one sequence without an axis for the batch: (steps, in), and states (layers * directions, width)."""
        if x.shape[0] == 0:
            raise self._unfit("input", x, "one step at least")
        state = None
        if hx is not None:
            several = isinstance(hx, _PAIRS)
            given = [h.unsqueeze(1) if isinstance(h, Tensor) else h for h in (hx if several else [hx])]
            state = self._require_state(tuple(given) if several else given[0], 1, self.ways)
        y, (h, c) = self._run(x, 1, None, state)
        return y, h.squeeze(1) if c is None else (h.squeeze(1), c.squeeze(1))

    def _packed(self, given: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        x, sizes, order, back = given
        x = self._require(x, (2,), "(tokens, {0})")
        batch = int(sizes[0])
        state = None if hx is None else _rearranged(self._require_state(hx, batch, self.ways), order)
        y, last = self._run(x, batch, sizes, state)
        h, c = _rearranged(last, back)
        return PackedSequence(y, sizes, order, back), h if c is None else (h, c)


class CompiledCell(RecurrentLayer):
    """An LSTMCell, GRUCell or RNNCell for inference, with the calls of torch's."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state, of an LSTM (h, c), as torch.nn.LSTMCell, GRUCell and RNNCell do.

        Args:
            input: (batch, in) or (in,).
            hx: The state before: (batch, hidden) or (hidden,), of an LSTM two of them; zeros by default.

        Raises:
            KernelError: Shape, dtype or device of an operand do not fit, or a gradient is asked for.
        """
        try:
            return self._step(input, hx)
        except KernelError as error:
            raise error.for_layer(self.name) from None
        except STRANGE as error:
            if unreadable(input) is None:
                raise
            raise self._unfit("input", input, "a plain tensor") from error

    def _step(self, x: Tensor, hx: Any) -> Any:
        x = self._require(x, (1, 2), "(batch, {0}) or ({0},)")
        single = x.ndim == 1
        x = x.unsqueeze(0) if single else x
        batch, lstm, state = x.shape[0], self.problem.cell == "lstm", None
        if hx is not None:
            given = tuple(hx) if lstm and isinstance(hx, _PAIRS) else (hx,)
            rows = [one.unsqueeze(0) if single and isinstance(one, Tensor) else one for one in given]
            h, c = self._require_state(tuple(rows) if lstm else rows[0], batch, None)
            state = h.unsqueeze(0), None if c is None else c.unsqueeze(0)
        _, last = self._run(x, batch, None, state)
        h, c = (one if one is None else one[0, 0] if single else one[0] for one in last)
        return h if c is None else (h, c)

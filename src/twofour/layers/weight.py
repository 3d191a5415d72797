"""One weight that a pattern can be laid over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from twofour.layers.axis import Reduction
from twofour.layers.kinds import Feed, Kind
from twofour.layers.modules import parameters_of
from twofour.patterns import Pattern


@dataclass(frozen=True)
class PrunableWeight:
    """One weight that a pattern can be laid over.

    Attributes:
        name: Full parameter name, "encoder.fc1.weight".
        layer: Name of the module that owns it, "encoder.fc1"; "" when the model is the layer.
        module: That module.
        attribute: Name of the parameter in the module.
        of: Kind of weight: its reduction axis, its inputs.
        aliases: Further names of the same (tied) parameter.
        shared: The other modules that multiply by it, each with the parameter's name there and in full.
    """

    name: str
    layer: str
    module: nn.Module
    attribute: str
    of: Kind
    aliases: tuple[str, ...] = ()
    shared: tuple[tuple[nn.Module, str, str], ...] = ()

    @property
    def kind(self) -> str:
        """Name of the kind: "linear", "conv2d", "lstm", ..."""
        return self.of.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter, `name` first."""
        return (self.name, *self.aliases)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of all layers that share the weight, `layer` first."""
        return (self.layer, *(alias.rpartition(".")[0] for alias in self.aliases))

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself, looked up again at each call."""
        parameter = parameters_of(self.module)[self.attribute]
        assert parameter is not None, self.name
        return parameter

    @property
    def axis(self) -> Reduction:
        """The axis of the weight that its product sums over, and in how many parts."""
        return self.of.reduction(self.module)

    @property
    def rows(self) -> int:
        """How many rows of `reduction` values: out times the kernel positions."""
        return self.parameter.numel() // max(self.reduction, 1)

    @property
    def reduction(self) -> int:
        """How many values a row sums over: in_features, or in_channels / groups."""
        return self.axis.length(self.parameter.shape)

    def lay(self, pattern: Pattern) -> Pattern:
        """Return a pattern as this weight carries it: no block reaches from one gate to the next."""
        out = self.of.rows(self.module, self.parameter.shape)
        return pattern.on_parts(self.of.stacked(self.attribute), out)

    def unfit(self, pattern: Pattern) -> str:
        """Return why the weight cannot carry a pattern, "" where it can; see `Pattern.unfit`."""
        out = self.of.rows(self.module, self.parameter.shape)
        return pattern.unfit(self.rows // max(out, 1), self.reduction)

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Which argument of the module's forward each block of rows multiplies, in the order of the rows.

        A hook on `module` finds it with `feed.find(args, kwargs)`: (..., in), or (batch, in, [spatial]) where the
        weight is a convolution's. One block, but for attention's `in_proj_weight`: query, key and value.
        """
        return self.of.feeds(self.module, self.attribute, self.of.rows(self.module, self.parameter.shape))

    def reduction_last(self, tensor: Tensor) -> Tensor:
        """View a tensor of the weight's shape as (out, [spatial], in), so that groups lie along the last axis.

        Of a transposed convolution with groups this is a copy.
        """
        return self.axis.last(tensor)

    def from_reduction_last(self, tensor: Tensor) -> Tensor:
        """Return a tensor as `reduction_last` gives it in the weight's own order."""
        return self.axis.restore(tensor)

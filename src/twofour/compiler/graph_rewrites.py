"""All rewrites of a captured graph, in their order, and the kernels of its products between them.

A rule that raises costs the rule, not the graph: `rewriting` names it, and the caller captures the graph again, which
the rule may have left half changed, and rewrites it without that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from twofour.capture import Graph
from twofour.compiler.attention_int8 import AttentionChoice
from twofour.compiler.conv import CompiledConv
from twofour.compiler.conv_chain import IN_A_CHAIN, convolutions_in_a_row
from twofour.compiler.fused_matmuls import most_tokens, place_products
from twofour.compiler.graph_algebra import rewrite_algebra
from twofour.compiler.graph_bits_linear import LINEAR_CODES, Handed
from twofour.compiler.graph_conv import place_convs
from twofour.compiler.graph_low_bits import CODES, place_low_bits
from twofour.compiler.graph_recurrent import RECURRENT, place_recurrent
from twofour.compiler.handed_bytes import IN_BYTES, hand_on_bytes
from twofour.compiler.handed_images import IMAGES_IN_BYTES, IMAGES_LOWERED, hand_on_images, lower_images
from twofour.compiler.head_tables import look_up_in_heads
from twofour.compiler.layer import CompiledLinear
from twofour.compiler.mlp import IN_A_ROW, products_in_a_row
from twofour.compiler.normed import NORMED, OF_NORMED, norms_before_products, norms_into_products
from twofour.compiler.pixel_means import PIXEL_MEANS, place_pixel_means
from twofour.compiler.plan import LayerPlan, Plan
from twofour.compiler.squeeze import SQUEEZED, place_squeeze_excite
from twofour.compiler.terms import Terms
from twofour.graph import JOIN_QKV, Outcome, arrange, fuse, lower_activations, simplify, widen_activations
from twofour.graph.base import rewriting
from twofour.graph.blocks import Always, Blocks, Measured, fuse_blocks

LOWERED = ("bfloat16", "int8")
"""Computing types whose graphs hand bfloat16 from layer to layer: their products round what they read to no more than
that."""

BETWEEN = "activations between layers in bfloat16"
"""What the account calls it: a rewrite that rounds."""

OF_ITS_OWN = "a bfloat16 model's operators fused"
"""What the account calls it: the rules know float32, so such a model is rewritten as one of that, and bfloat16 is
handed on between what they made."""

BLOCKS = "fused blocks"
"""What the account calls them."""

LOOKED_UP = "rows of tables looked up in the weights of heads"
"""What the account calls it: a table that is tied to a head is kept once."""

LEAST_LOWERED = 16
"""Tokens from which they do: with fewer the weights take the time, and conversions at the graph's edges are calls."""


@dataclass
class Rewrites:
    """What became of a graph.

    Attributes:
        without: Rules that are left out, with why.
        counts: Places changed, by rule.
        algebra: What the rules of algebra did.
        blocks: The fused blocks.
        apart: Why convolutions in a row stayed separate calls.
        handed: Which Linears of low bits hand codes on.
        attention: What became of attention in int8.
        added: Plan entries for weights that are kept besides the layers'.
    """

    without: Mapping[str, str]
    counts: dict[str, int] = field(default_factory=dict)
    algebra: Outcome = field(default_factory=Outcome)
    blocks: Blocks = field(default_factory=Blocks)
    apart: tuple[str, ...] = ()
    handed: Handed = field(default_factory=Handed)
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    added: tuple[LayerPlan, ...] = ()

    @property
    def said(self) -> dict[str, Any]:
        """Return what the account says beside the counts."""
        bounds, not_done = self.algebra.bounds, self.algebra.not_done
        return {
            "blocks": self.blocks.text(),
            "bounds": bounds,
            "not_rewritten": (*not_done, *self.apart, *self.handed.why_not),
            "left_out": dict(self.without),
            "attention": self.attention.text,
        }

    def step(self, name: str, rewrite: Callable[[], int]) -> None:
        """Do one rewrite that is no list of rules, unless it is left out."""
        if name not in self.without:
            with rewriting(name):
                self.counts[name] = rewrite()


def compiled_layers(fast: nn.Module) -> tuple[dict[str, CompiledLinear], dict[str, CompiledConv]]:
    """Return the compiled Linears and convolutions of a model by name."""
    modules = list(fast.named_modules())
    layers = {name: module for name, module in modules if isinstance(module, CompiledLinear)}
    return layers, {name: module for name, module in modules if isinstance(module, CompiledConv)}


def rewrite_graph(
    fast: nn.Module, graph: Graph, plan: Plan, leaves: Sequence[Any], terms: Terms, without: Mapping[str, str]
) -> Rewrites:
    """Rewrite a graph, give its convolutions and products their kernels, and fuse what shows then.

    With memory="small" no weight is kept twice: merging, folding and joining would make copies beside the layers'.

    Args:
        fast: The model with compiled layers.
        graph: As captured; it is changed.
        plan: What was decided for the layers.
        leaves: The example.
        terms: What holds for every layer.
        without: Rules to leave out, by name.

    Raises:
        FailedRuleError: A rule raised: the graph is of no use any more.
    """
    module, copies = graph.module, terms.memory == "fast"
    found = Rewrites(without)
    layers, convs = compiled_layers(fast)
    _low_bits(found, fast, module)
    found.step(OF_ITS_OWN, lambda: widen_activations(module, {*layers, *convs}))
    own = found.counts.get(OF_ITS_OWN, 0) > 0
    found.counts |= simplify(module, without)
    found.algebra = rewrite_algebra(module, fast, layers, terms.rules, merge=copies, without=without)
    found.counts |= {**found.algebra.counts, **fuse(module, copies=copies, without=without)}
    if own or (terms.computing.dtype in LOWERED and most_tokens(module, leaves) >= LEAST_LOWERED):
        found.step(BETWEEN, lambda: lower_activations(module))
    if terms.computing.dtype == "int8":
        found.step(IN_BYTES, lambda: hand_on_bytes(module, layers))
    _place(found, fast, graph, plan, leaves, terms)
    found.step(NORMED, lambda: norms_into_products(module))
    found.step(OF_NORMED, lambda: norms_before_products(module))
    found.step(IN_A_ROW, lambda: products_in_a_row(module))
    found.counts |= arrange(module, without)

    def chains() -> int:
        count, found.apart = convolutions_in_a_row(module, terms.cache)
        return count

    found.step(IN_A_CHAIN, chains)

    found.step(LOOKED_UP, lambda: look_up_in_heads(module, fast, terms.tables))

    def blocks() -> int:
        times = Always() if terms.native else Measured(terms.cache)
        found.blocks = fuse_blocks(module, times, singles=terms.native)
        return len(found.blocks.labels)

    found.step(BLOCKS, blocks)
    return found


def _low_bits(found: Rewrites, fast: nn.Module, module: fx.GraphModule) -> None:
    """Let layers of low bits run on their kernels, with codes between them unless that raised."""
    if CODES in found.without:
        place_low_bits(module, fast, hand_on=False)

    def handing_on() -> int:
        count, found.handed = place_low_bits(module, fast)
        return count

    found.step(CODES, handing_on)
    found.counts[LINEAR_CODES] = len(found.handed.codes)


def _place(found: Rewrites, fast: nn.Module, graph: Graph, plan: Plan, leaves: Sequence[Any], terms: Terms) -> None:
    """Give convolutions, products and recurrent layers what they run on, and means and squeeze-and-excite a call."""
    layers, convs = compiled_layers(fast)
    plans = {layer.name: layer for layer in plan.layers}
    folded = place_convs(graph.module, convs, plans, terms)
    because = {name: plan.dense_because for name, plan in plans.items()}
    lowered = found.counts.get(BETWEEN, 0) > 0 and not found.counts.get(OF_ITS_OWN)  # its layers were measured on them
    placed, apart = place_products(graph, leaves, layers, terms, lowered=lowered, dense_because=because)
    if apart:  # the rule joined them; measuring took them apart
        found.counts[JOIN_QKV.name] -= apart
    found.step(RECURRENT, lambda: place_recurrent(graph.module))
    if terms.computing.dtype == "int8":
        found.step(IMAGES_IN_BYTES, lambda: hand_on_images(graph.module))
        found.step(IMAGES_LOWERED, lambda: lower_images(graph.module))
    squeezed: list[LayerPlan] = []

    def squeeze() -> int:
        count, entries = place_squeeze_excite(graph.module, plans)
        squeezed.extend(entries)
        return count

    if terms.memory == "fast":  # the two weights are kept once more
        found.step(SQUEEZED, squeeze)
    found.step(PIXEL_MEANS, lambda: place_pixel_means(graph.module))
    found.added = (*folded, *placed, *squeezed)

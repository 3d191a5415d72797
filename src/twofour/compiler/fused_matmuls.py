"""The matmuls of a rewritten graph get their kernels: those of the compiled layers, or measured ones of their own."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor, fx

from twofour.capture import Graph
from twofour.compiler.case import as_bytes
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.plan import LayerPlan, described
from twofour.compiler.prepared import on_own
from twofour.compiler.reasons import ALONE, TIE, explain, explain_join
from twofour.compiler.terms import Terms
from twofour.graph import Product, Source
from twofour.graph.base import insert, place, product, value
from twofour.kernels.base import Prepared
from twofour.kernels.nm_matmul import DYNAMIC
from twofour.kernels.problem import Problem
from twofour.kernels.quantization import Quantization
from twofour.measure.chooser import race
from twofour.packing import Header, Packed, dense_of, has_form, one_below_the_other, rewrite, shape_of
from twofour.packing.formats import ConstantCount, DenseRows, HybridRows
from twofour.patterns import DENSE

logger = logging.getLogger("twofour.compiler")

HANDED = "handed"
"""In a marked product's `meta`: the range of the whole numbers that it answers in, where its readers take those."""


class ProductLayer(CompiledLinear):
    """A compiled Linear inside a graph: named in the account by its epilogue; of a static range it reads bytes too.

    Attributes:
        tokens: Its token count on the example, None where that is not known.
        divided: Whether its scales are not those of its layers.
    """

    by_token = True
    tokens: int | None = None
    divided = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read_bytes()

    @property
    def label(self) -> str:
        """Return "linear" with the epilogue, such as "linear+gelu"."""
        parts = [self.problem.epilogue.activation, self.problem.epilogue.combine]
        return "+".join(["linear", *(part for part in parts if part != "none")])


@dataclass(frozen=True)
class Types:
    """What a product reads and answers inside a graph.

    Attributes:
        read: dtype of its input.
        answer: Its answer's dtype where the input is whole; the range of bytes, where it hands on those; else None.
    """

    read: torch.dtype
    answer: torch.dtype | Quantization | None = None

    @property
    def whole(self) -> bool:
        """Whether whole numbers go in or out."""
        return self.answer is not None

    def quantization(self, ranged: Quantization) -> Quantization:
        """Return a layer's quantization with the answer that the graph wants."""
        if isinstance(self.answer, Quantization):
            scale = self.answer.x_scale
            assert scale is not None
            return replace(ranged, y_dtype=torch.uint8, y_scale=scale, y_zero=self.answer.x_zero)
        return ranged if self.answer is None else replace(ranged, y_dtype=self.answer)


def answer_of(node: fx.Node) -> torch.dtype | Quantization | None:
    """Return `Types.answer` of a marked product."""
    if (handed := node.meta.get(HANDED)) is not None:
        return handed
    return value(node).dtype if value(node.args[0]).dtype is torch.uint8 else None


def place_products(
    graph: Graph,
    leaves: Sequence[Any],
    layers: Mapping[str, CompiledLinear],
    terms: Terms,
    *,
    lowered: bool = False,
    dense_because: Mapping[str, str] | None = None,
) -> tuple[tuple[LayerPlan, ...], int]:
    """Replace every marked product of the graph by a layer.

    Args:
        graph: Rewritten; it is changed.
        leaves: The example, for token counts.
        layers: The compiled layers by name.
        terms: What holds for every layer.
        lowered: Whether activations are bfloat16 that are not in the model: the layers were measured on others.
        dense_because: Why layers' weights are not packed, by name.

    Returns:
        Plan entries for weights that are kept besides, and how many joined products are apart again.
    """
    module = graph.module
    sizes = _Sizes(module, leaves)
    placer = _Placer(module, layers, terms, lowered, dense_because or {})
    waiting, apart = [node for node in module.graph.nodes if "product" in node.meta], 0
    for index in count():
        if not waiting:
            break
        node = waiting.pop(0)
        types = Types(value(node.args[0]).dtype, answer_of(node))
        layer = placer.layer(node.meta["product"], sizes.tokens(node), types)
        if layer is None:
            waiting, apart = _separate(node) + waiting, apart + 1
            continue
        place(module, node, f"product_{index}", layer)
    _drop_unused(module)
    module.graph.lint()
    return tuple(placer.plans), apart


def most_tokens(module: fx.GraphModule, leaves: Sequence[Any]) -> int:
    """Return the largest token count of any marked product on the example; 0 without products."""
    sizes = _Sizes(module, leaves)
    return max((sizes.tokens(node) for node in module.graph.nodes if "product" in node.meta), default=0)


def _separate(node: fx.Node) -> list[fx.Node]:
    """Undo the joining of a product; returns the products of its parts."""
    joined: Product = node.meta["product"]
    begins = list(accumulate((source.rows for source in joined.sources), initial=0))
    parts = []
    for user in list(node.users):
        begin, rows = user.args[2:4]
        sources = tuple(s for s, b in zip(joined.sources, begins, strict=False) if begin <= b < begin + rows)  # pyright: ignore
        parts.append(insert(node, product, (node.args[0],), user, product=Product(sources)))
        user.replace_all_uses_with(parts[-1])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return parts


class _Placer:
    def __init__(
        self,
        module: fx.GraphModule,
        layers: Mapping[str, CompiledLinear],
        terms: Terms,
        lowered: bool,
        dense_because: Mapping[str, str],
    ) -> None:
        self.module, self.layers, self.terms, self.lowered = module, layers, terms, lowered
        self.dense_because = dense_because
        self.cache = terms.cache
        self.footprint = sum(4 * layer.in_features * layer.out_features for layer in layers.values())
        self.plans: list[LayerPlan] = []

    def layer(self, product: Product, tokens: int, types: Types) -> ProductLayer | None:
        """Return the layer for one product, or None where its parts are faster apart.

        A product that is one compiled layer has that layer's weights and table, where that was measured on its input.
        """
        first = self.layers.get(product.sources[0].layer) if len(product.sources) == 1 else None
        # One layer's product: its kernels were chosen on float32 inputs. In a graph with bfloat16 activations they are
        # measured again, unless no second copy of the weight may be made.
        if first is not None and (not (self.lowered or types.whole) or self.terms.memory == "small"):
            ranged = types.quantization(first.problem.quantization)
            problem = replace(first.problem, epilogue=product.epilogue, quantization=ranged)
            made = _inside(first, problem, (first.name,))
            made.tokens = tokens
            return made
        if len({self.layers[source.layer].problem.quantization for source in product.sources if source.layer}) > 1:
            return None  # they take different ranges of the input
        # Joined sources become one weight, their rows one below the other, with the bias and the reason of the first
        # one that could not be packed.
        found = [self.weight(source) for source in product.sources]
        weights, reasons = [weight for weight, _ in found], [reason for _, reason in found]
        weight = joined(weights)
        if weight is None:
            return None
        biases = [self.bias(source) for source in product.sources]
        bias, because = _joined_bias(biases, product), next(filter(None, reasons), "")
        return self.measured(product, weight, because, bias, tokens, types)

    def weight(self, source: Source) -> tuple[Packed | Tensor, str]:
        """Return the rows of one source, and why they are not sparse, "" where they are.

        A layer's are what a file holds: whole numbers stay those that the layer multiplies by.
        """
        if source.layer:
            held = self.layers[source.layer].prepared.stored()
            sparse = isinstance(held, Packed) and held.header.sparse
            return held, "" if sparse else self.dense_because.get(source.layer) or ALONE
        stored = getattr(self.module, source.weight.replace(".", "__"))
        dense = stored.detach().t().contiguous() if source.transposed else stored.detach()
        pattern, because = self.terms.computing.find(dense)
        return (dense, because) if pattern is None else self.terms.computing.encode(dense, pattern)

    def bias(self, source: Source) -> Tensor | None:
        if source.layer:
            return self.layers[source.layer].bias
        return getattr(self.module, source.bias.replace(".", "__")) if source.bias else None

    def measured(
        self, product: Product, weight: Packed | Tensor, because: str, bias: Tensor | None, tokens: int, types: Types
    ) -> ProductLayer | None:
        """Choose kernels for a weight that no compiled layer has; None where its parts are faster apart."""
        names = [source.layer or source.weight.removesuffix(".weight") for source in product.sources]
        name = _name(names)
        rows, columns = shape_of(weight)
        terms = self.terms
        parts = [self.layers[source.layer] for source in product.sources if source.layer in self.layers]
        ranged = parts[0].problem.quantization if parts else DYNAMIC  # joined layers have one input, so one range
        problem = Problem(rows, product.epilogue, types.quantization(ranged))
        # A dense weight that the layers leave to torch keeps its own numbers: rounding it would be a surprise.
        rounded = parts or isinstance(weight, Packed)
        dtype = terms.computing.dtype if rounded else str(types.read).removeprefix("torch.")
        options = {"dtype": dtype, "activations": types.read}
        choice = terms.choose(name, weight, bias, tokens, self.footprint, problem, **options)
        prepared = self.held(product, choice.layouts)
        remark = choice.dispatch.at(tokens)[0].remark(columns)
        reason = explain(choice, tokens, because, terms.memory, "in the graph", remark)
        layer = ProductLayer(name, columns, problem, choice.dispatch, prepared, bias)
        layer.sources, layer.tokens = tuple(source.layer for source in product.sources), tokens
        if len(parts) > 1:
            together, apart, origin = self.together_and_apart(layer, parts, tokens, types)
            joined = explain_join(together, apart) + (f" ({origin})" if origin else "")
            reason = "; ".join(filter(None, (joined, remark)))
            if together > TIE * apart:
                logger.info("`%s` is not %s", name, reason)
                return None
        before, after = self.own_bytes(product, prepared)
        held, sizes = tuple(names) if len(names) > 1 else (), (before, after, before)
        given = tokens, choice, reason, sizes, held
        self.plans.append(described(name, "product", (rows, columns), *given, dense_because=because))
        return layer

    def held(self, product: Product, layouts: Mapping[str, Prepared]) -> PreparedWeights:
        """Return a product's weight: that of another graph with the same layers, or what its one layer has of it."""
        first, *others = names = tuple(source.layer for source in product.sources)
        if others:
            made = PreparedWeights(layouts.values())
            return self.terms.joined.setdefault((names, made.layouts), made) if all(names) else made
        layer, source = self.layers.get(first), product.sources[0]
        # One that stands turned is kept in rows too, for speed, but where memory counts.
        if layer is None and (not source.transposed or self.terms.memory == "small"):
            own = getattr(self.module, source.weight.replace(".", "__"))
            return PreparedWeights(on_own(made, own, turned=source.transposed) for made in layouts.values())
        known = {} if layer is None else dict(zip(layer.prepared.layouts, layer.prepared.weights, strict=True))
        return PreparedWeights(known.get(layout, made) for layout, made in layouts.items())

    def together_and_apart(
        self, layer: CompiledLinear, parts: Sequence[CompiledLinear], tokens: int, types: Types
    ) -> tuple[float, float, str]:
        """Return the seconds of a joined product and of its parts, and whose times they are, "" for this machine's.

        They are measured once for layers of one kind.
        """
        facts = [one.dispatch_text for one in (layer, *parts)]
        quantization = layer.problem.quantization  # of a static range the values cost no time
        if not quantization.dynamic or quantization.y_dtype is not None:
            facts.append(f"{'dynamic' if quantization.dynamic else 'static'} {quantization.y_dtype}")
        digest = hashlib.sha256(" ".join(facts).encode()).hexdigest()[:16]
        held = str(types.read).removeprefix("torch.")
        alone = [_inside(part, replace(part.problem, quantization=layer.problem.quantization)) for part in parts]
        key = self.cache.key(f"joined/{layer.out_features}x{layer.in_features}@{tokens}/{held}/{digest}")
        found = self.cache.times(
            key, ("together", "apart"), lambda: together_and_apart(layer, alone, tokens, types.read)
        )
        return found["together"], found["apart"], self.cache.origin([key])

    def own_bytes(self, product: Product, prepared: PreparedWeights) -> tuple[int, int]:
        """Return the bytes of a product's weight that the model holds, and those with what the graph adds to it.

        The weights of joined products are counted where their layers are.
        """
        source, *others = product.sources
        if others or source.layer:
            own = {} if others else {id(weight) for weight in self.layers[source.layer].prepared.weights}
            return 0, sum(weight.nbytes for weight in prepared.weights if id(weight) not in own)
        stored = getattr(self.module, source.weight.replace(".", "__"))
        added = [t for t in prepared.tensors if t.is_mkldnn or t.data_ptr() != stored.data_ptr()]
        return stored.nbytes, stored.nbytes + sum(t.numel() * t.element_size() for t in added)


def _inside(layer: CompiledLinear, problem: Problem, sources: tuple[str, ...] = ()) -> ProductLayer:
    """Return a compiled layer as a graph has it, with what happens there to its product."""
    made = ProductLayer(layer.name, layer.in_features, problem, layer.dispatch, layer.prepared, layer.bias)
    made.sources = sources
    return made


def together_and_apart(
    layer: CompiledLinear, parts: Sequence[CompiledLinear], tokens: int, activations: torch.dtype
) -> tuple[dict[str, float], float]:
    """Race a joined product against its parts one after the other."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, layer.in_features, generator=generator, dtype=torch.float32, device="cpu")
    x = as_bytes(x) if activations is torch.uint8 else x.to(activations)
    return race({"together": lambda: layer(x), "apart": lambda: [part(x) for part in parts]}, seconds=0.2)


def _name(names: Sequence[str]) -> str:
    """Return one name for joined layers: what theirs have in common, then what they have not."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shared = next((i for i, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1), 0)
    return ".".join([*parts[0][:shared], f"({' + '.join('.'.join(part[shared:]) for part in parts)})"])


def joined(weights: Sequence[Packed | Tensor]) -> Packed | Tensor | None:
    """Return one weight whose rows are those of `weights`, packed where all are, of one kind.

    Kinds that differ in what is sparse alone are written dense, where their encoding has that form; dense groups of
    inputs become those of all. None where blocks are kept, which is said once for all rows of a weight, or where such
    groups leave none that is 2:4.
    """
    if len(weights) == 1:
        return weights[0]
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if any(isinstance(weight.header.format, HybridRows) for weight in packed):
        return one_below_the_other(packed) if len(packed) == len(weights) else None
    if not all(isinstance(weight.header.format, ConstantCount | DenseRows) for weight in packed):
        return None
    if len({weight.header.pattern for weight in packed}) > 1 and len({weight.header.dtype for weight in packed}) == 1:
        packed = [rewrite(weight, DENSE) for weight in packed if has_form(DENSE, weight.header.dtype)]
    if len(packed) < len(weights) or len({_kind(weight) for weight in packed}) > 1:
        return torch.cat([dense_of(weight) for weight in weights])
    first = packed[0]
    rows = sum(weight.header.rows for weight in packed)
    header = Header(**{**first.header.__dict__, "shape": (rows, *first.header.shape[1:])})

    def part(name: str) -> Tensor | None:
        parts = [getattr(weight, name) for weight in packed]
        return None if parts[0] is None else torch.cat(parts)

    values, indices = part("values"), part("indices")
    assert values is not None and indices is not None
    return Packed(header, values, indices, part("scales"), part("zeros"))


def _kind(weight: Packed) -> tuple[object, ...]:
    header = weight.header
    return header.pattern, header.dtype, header.group, weight.scales is None, weight.zeros is None


def _joined_bias(biases: Sequence[Tensor | None], product: Product) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    rows = [source.rows for source in product.sources]
    return torch.cat(
        [
            torch.zeros(n, dtype=torch.float32, device="cpu") if b is None else b.detach()
            for n, b in zip(rows, biases, strict=True)
        ]
    )


class _Sizes:
    """What the symbols of a captured graph are for the example."""

    def __init__(self, module: fx.GraphModule, leaves: Sequence[Any]) -> None:
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.known: dict[Any, int] = {}
        for node, leaf in zip(nodes, leaves, strict=True):
            for symbol, size in zip(
                getattr(node.meta.get("val"), "shape", ()), getattr(leaf, "shape", ()), strict=True
            ):
                if not isinstance(symbol, int):
                    self.known[symbol.node.expr] = int(size)

    def tokens(self, node: Any) -> int:
        """Return the rows of a product's input."""
        rows = 1
        for size in node.args[0].meta["val"].shape[:-1]:
            rows *= size if isinstance(size, int) else int(size.node.expr.xreplace(self.known))
        return max(rows, 1)


def _drop_unused(module: fx.GraphModule) -> None:
    """Forget weights that the graph no longer reads."""
    used = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in [name for name, _ in module.named_buffers(recurse=False) if name not in used]:
        delattr(module, name)

"""Rules of the operators that compute: products, convolutions, normalisations, poolings, pointwise functions."""

from __future__ import annotations

from twofour.structure.coupling.axes import Axis, DoesNotDivide, factors, fix, regroup, unify
from twofour.structure.coupling.axes import size as size_of
from twofour.structure.coupling.call import Axes, Call, Value, fresh, rule


@rule(
    "dropout alpha_dropout feature_dropout native_dropout contiguous clone to _to_copy detach alias "
    "type_as lift_fresh_copy lift_fresh softplus leaky_relu gelu silu relu relu6 hardtanh hardswish "
    "hardsigmoid elu celu selu mish glu_jvp tanh sigmoid exp sqrt rsqrt clamp masked_fill where add sub "
    "mul div maximum minimum pow zeros_like ones_like full_like float half double bfloat16 square "
    "logical_not rsub"
)
def pointwise(call: Call) -> Axes:
    """Values of one place make one value: broadcast axes line up from the right."""
    shape, operands = call.shape, call.operands()
    answer: Axes = []
    for back in range(len(shape), 0, -1):
        axes = [axes[-back] for axes in operands if len(axes) >= back and size_of(axes[-back]) != 1]
        for other in axes[1:]:
            unify(axes[0], other)
        answer.append(axes[0] if axes else fresh(shape[-back]))
    return answer


@rule("zeros ones full new_zeros new_ones new_full")
def constant(call: Call) -> Axes:
    """One value everywhere: any order is the same."""
    return [fresh(size) for size in call.shape]


@rule("linear")
def linear(call: Call) -> Axes:
    """Sums over the last axis of both."""
    x, weight = call.axes("input"), call.axes("weight")
    unify(x[-1], weight[-1])
    if call.given("bias"):
        unify(call.axes("bias")[0], weight[0])
    return [*x[:-1], *weight[:-1]]


@rule("matmul mm bmm")
def matmul(call: Call) -> Axes:
    """Sums over the last axis of the first and the last but one of the second; the others before are a batch."""
    return product(call, call.axes("self"), call.axes("other" if "other" in call.named else "mat2"))


@rule("addmm baddbmm")
def addmm(call: Call) -> Axes:
    """A product and a bias that is broadcast."""
    first, second = ("mat1", "mat2") if "mat1" in call.named else ("batch1", "batch2")
    answer = product(call, call.axes(first), call.axes(second))
    for mine, bias in zip(reversed(answer), reversed(call.axes("self")), strict=False):
        call.pair(mine, bias)
    return answer


def product(call: Call, a: Axes, b: Axes) -> Axes:
    """The axes of a matrix product, as torch.matmul understands them."""
    if len(b) == 1:
        unify(a[-1], b[0])
        return a[:-1]
    unify(a[-1], b[-2])
    batch: Axes = []
    for back in range(max(len(a), len(b)), 2, -1):
        axes = [axes[-back] for axes in (a, b) if len(axes) >= back and size_of(axes[-back]) != 1]
        for other in axes[1:]:
            unify(axes[0], other)
        batch.append(axes[0] if axes else [])
    return [*batch, *([a[-2]] if len(a) > 1 else []), b[-1]]


@rule("einsum")
def einsum(call: Call) -> Axes:
    """One letter is one axis."""
    left, _, right = str(call["equation"]).replace(" ", "").partition("->")
    if "." in left or not right:
        raise DoesNotDivide(f"einsum {call['equation']!r}")
    letters: dict[str, Axis] = {}
    for word, node in zip(left.split(","), call["tensors"], strict=True):
        for letter, axis in zip(word, call.of(node), strict=True):
            unify(letters.setdefault(letter, axis), axis)
    return [letters[letter] for letter in right]


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Axes:
    """softmax(q k^T + mask) v: heads are a batch, positions stay."""
    q, k, v = call.axes("query"), call.axes("key"), call.axes("value")
    for axes in (q, k, v):
        fix(axes[-2], "positions of attention")
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    if call["scale"] is None:
        call.notes.rigid.append((q[-1], "attention is scaled by the width of its heads"))
    for index, axis in enumerate(q[:-2]):
        mine = axis
        if call["enable_gqa"] and index == len(q) - 3 and size_of(axis) != size_of(k[index]):
            mine = regroup([axis], [size_of(k[index]), size_of(axis) // size_of(k[index])])[0]
        call.pair(mine, k[index])
        call.pair(mine, v[index])
    if call.given("attn_mask"):
        for mine, mask in zip(reversed(q[:-2]), reversed(call.axes("attn_mask")[:-2]), strict=False):
            call.pair(mine, mask)
        for axis in call.axes("attn_mask")[-2:]:
            fix(axis, "positions of attention")
    return [*q[:-1], v[-1]]


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(call: Call) -> list[Axes]:
    """Layers and directions whose states share one order: torch keeps one size for all of them."""
    if "input" not in call.named:
        raise DoesNotDivide("packed sequences")
    x, first = call.axes("input"), call["hx"] if isinstance(call["hx"], list) else [call["hx"]]
    states = call.of(first[0])[-1]
    for node in first:
        unify(call.of(node)[-1], states)
    both = fresh(2 if call["bidirectional"] else 1, "directions")
    _states_of_layers(call, [call.of(node) for node in call["params"]], x[-1], [*both, *states])
    for axis in x[:-1]:
        fix(axis, "steps of a recurrent layer")
    answer = [*x[:-1], [*both, *states]]
    return [answer, *([*(fresh(size, "layers") for size in shape[:-1]), states] for shape in call.shapes[1:])]


def _states_of_layers(call: Call, params: list[Axes], inputs: Axis, outputs: Axis) -> None:
    """Couple the weights of a recurrent call: each is (gates x states, what it multiplies)."""
    count, size = 4 if call["has_biases"] else 2, call.shapes[1][-1]
    directions = 2 if call["bidirectional"] else 1
    if len(params) != count * directions * call["num_layers"]:
        raise DoesNotDivide("projections of states")
    for index in range(0, len(params), count):
        unify(inputs if index < count * directions else outputs, params[index][1])
        unify(outputs[directions > 1 :], params[index + 1][1])
        for weight in params[index : index + count]:
            gates, states = regroup([weight[0]], [size_of(weight[0]) // size, size])
            fix(gates, "gates")
            unify(states, outputs[directions > 1 :])


@rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def layer_norm(call: Call) -> Value:
    """Normalises over the last axes; weight and bias lie along them."""
    x, count = call.axes("input"), len(call["normalized_shape"])
    for name in ("weight", "bias"):
        if call.given(name):
            for mine, other in zip(x[-count:], call.axes(name), strict=True):
                unify(mine, other)
    call.notes.bars += [(axis, inner) for axis in x[:-count] for inner in x[-count:]]
    call.notes.normalised += [(inner, "layer_norm") for inner in x[-count:]]
    return x if len(call.shapes) == 1 else [x, *([fresh(n, "statistics") for n in shape] for shape in call.shapes[1:])]


@rule("softmax _softmax log_softmax _log_softmax")
def softmax(call: Call) -> Axes:
    """Normalises over one axis."""
    x = call.axes("self")
    dim = call.axis(call["dim"], len(x))
    call.notes.bars += [(axis, x[dim]) for index, axis in enumerate(x) if index != dim]
    call.notes.normalised.append((x[dim], "softmax"))
    return x


@rule("batch_norm native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm instance_norm")
def batch_norm(call: Call) -> Value:
    """Each channel by itself."""
    x = call.axes("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.given(name):
            unify(x[1], call.axes(name)[0])
    for axis in x[2:]:
        call.notes.bars.append((x[1], axis))
    return x if len(call.shapes) == 1 else [x, *([fresh(n, "statistics") for n in shape] for shape in call.shapes[1:])]


@rule("prelu _prelu_kernel")
def prelu(call: Call) -> Value:
    """Each channel with a slope of its own."""
    x, weight = call.axes("self"), call.axes("weight")
    if len(weight) == 1 and len(x) > 1:
        call.pair(x[1], weight[0])
        return x
    return pointwise(call)


@rule("group_norm")
def group_norm(call: Call) -> Axes:
    """Normalises over the channels of a group and their places; weight and bias lie along the channels."""
    x, groups = call.axes("input"), int(call["num_groups"])
    for name in ("weight", "bias"):
        if call.given(name):
            unify(x[1], call.axes(name)[0])
    inner = x[1]
    if groups > 1:
        outer, inner = regroup([x[1]], [groups, size_of(x[1]) // groups])
        call.notes.bars += [(outer, axis) for axis in (inner, *x[2:])]
        call.notes.counted.append((call.module, outer))
    call.notes.normalised.append((inner, "group_norm"))
    return x


@rule("conv1d conv2d conv3d convolution _convolution")
def convolution(call: Call) -> Axes:
    """Sums over the input channels of a group at every tap."""
    return convolve(call, transposed=bool(call["transposed"]))


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def transposed_convolution(call: Call) -> Axes:
    """The same with the weight as (in, out / groups, taps)."""
    return convolve(call, transposed=True)


def convolve(call: Call, *, transposed: bool) -> Axes:
    """The axes of a convolution: channels couple, places stay."""
    x, weight, groups = call.axes("input"), call.axes("weight"), int(call["groups"])
    spatial = len(weight) - 2
    for axis in (*x[-spatial:], *weight[2:]):
        fix(axis, "places of a convolution")
    inputs, outputs = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    channels = x[-spatial - 1]
    if groups > 1:
        block = size_of(inputs) // groups if transposed else size_of(inputs)
        group, channels = regroup([channels], [groups, block])
        call.notes.counted.append((call.module, group))
        if transposed:
            outer, inputs = regroup([inputs], [groups, block])
            unify(group, outer)
            answer = [*group, *outputs]
        else:
            outer, inner = regroup([outputs], [groups, size_of(outputs) // groups])
            unify(group, outer)
            answer = [*outer, *inner]
    else:
        answer = outputs
    unify(channels, inputs)
    if call.given("bias"):
        unify(call.axes("bias")[0], answer)
    return [*x[: -spatial - 1], answer, *(fresh(size, "places of a convolution") for size in call.shape[-spatial:])]


@rule(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool2d max_pool2d_with_indices upsample_nearest1d upsample_nearest2d "
    "upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d upsample_nearest3d "
    "_upsample_bilinear2d_aa"
)
def pooling(call: Call) -> Value:
    """Each channel by itself; places stay."""
    x = call.axes("self" if "self" in call.named else "input")
    name = call.node.target._schema.name  # type: ignore[union-attr]
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in name)
    apart = "neighbours that a pooling or LocalResponseNorm takes together"
    answer = list(x[:-spatial])
    for axis, size in zip(x[-spatial:], call.shape[-spatial:], strict=True):
        # LocalResponseNorm pools channels, which are to be named: places alone go on as places.
        places = all(atom.fixed in ("places of a convolution", "places of a pooling") for atom in factors(axis))
        answer.append(fresh(size, "places of a pooling" if places else apart))
        fix(axis, apart)
    return answer if len(call.shapes) == 1 else [answer, [fresh(n, "indices") for n in call.shapes[1]]]


@rule("mean sum amax amin logsumexp var std linalg_vector_norm norm all any")
def reduction(call: Call) -> Axes:
    """One value for all of some axes, in any order."""
    x = call.axes("self")
    given = call["dim"]
    dims = range(len(x)) if given is None or given == [] else [given] if isinstance(given, int) else given
    gone = {call.axis(dim, len(x)) for dim in dims}
    name = call.node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name not in ("sum", "linalg_vector_norm", "norm"):  # to which zeros add nothing
        call.notes.normalised += [(x[index], name) for index in gone]
    if call["keepdim"]:
        return [[] if index in gone else axis for index, axis in enumerate(x)]
    return [axis for index, axis in enumerate(x) if index not in gone]

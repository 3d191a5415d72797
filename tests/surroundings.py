"""A process of its own: every call of the table under every mode and on every kind of tensor, in forked children.

A case ends in "right" (the answer on a plain copy), "refused" (an error of ours) or in what it should not: another
error, another answer, a signal. One JSON object is printed: case -> end. With a word beside the command only
the cases are run whose kind of tensor begins with it: "freed".
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import twofour
from twofour.compiler import graph as compiled_graph
from twofour.compiler.conv import CompiledConv
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.compiler.whole_model import WholeModel
from twofour.errors import TwofourError
from twofour.kernels.attention import attention
from twofour.kernels.base import Kernel
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.nm_conv.reference import CONV_REFERENCE
from twofour.kernels.norm import norm
from twofour.kernels.problem import Problem
from twofour.kernels.table import available, convolutions
from twofour.packing import pack
from twofour.patterns import parse

torch.manual_seed(0)
torch.set_num_threads(1)
X, Q, IMAGE = torch.randn(8, 64), torch.randn(2, 2, 4, 8), torch.randn(1, 16, 8, 8)
DENSE = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
CONV = twofour.prune(nn.Sequential(nn.Conv2d(16, 16, 3)), "2:4").eval()
MASKED = twofour.prune(deepcopy(DENSE), "2:4")
FOLDER = mkdtemp()
quick = partial(twofour.compile, tokens=(8,), graph=False, memory="small")
FAST = {dtype: quick(deepcopy(MASKED), X, dtype=dtype) for dtype in ("float32", "bfloat16", "int8", "int4")}
FAST_CONV = quick(deepcopy(CONV), IMAGE)
assert all(
    type(layer).__name__.startswith("Compiled") for layer in (*(fast[0] for fast in FAST.values()), FAST_CONV[0])
)
W = MASKED[0].weight.detach()
PACKED = pack(W, "2:4")
twofour.save(FAST["float32"], f"{FOLDER}/fast.safetensors")


def by_row(kernel: Kernel) -> CompiledLinear:
    """Return a layer that runs on one row."""
    prepared = PreparedWeights([kernel.prepare(PACKED if kernel.sparse else W)])
    return CompiledLinear("fc", 64, Problem(128), read_dispatch(f"*={kernel.name}"), prepared, torch.ones(128))


def by_conv_row(kernel: ConvKernel) -> CompiledConv:
    """Return a convolution that runs on one row."""
    geometry, weight = Geometry(16, 16, (1, 1)), CONV[0].weight.detach()[:, :, :1, :1].contiguous()
    pattern = {"block": "block:4x4@0", "hybrid": "2:4+25%"}.get(kernel.pattern)
    given = pack(weight, pattern, axis=1) if pattern else weight
    prepared = PreparedWeights([kernel.prepare(given, geometry, (1, 8, 8))])
    return CompiledConv("conv", ConvProblem.of(geometry), read_dispatch(f"*={kernel.name}"), prepared, torch.ones(16))


LIBRARIES = {kernel.name: by_row(kernel) for kernel in available("dense_matmul") if kernel.dtype != "int4"}
NATIVE = {
    kernel.name: by_row(kernel)
    for kernel in available("nm_matmul")
    if kernel.dtype == "float32" and not kernel.refuses(PACKED)
}
compiled_graph._engines = lambda *_: ({"layers": 2.0, "graph": 1.0}, 0.0)  # whichever is faster: the graph is meant
GRAPH = quick(deepcopy(MASKED), X, graph=True)
assert isinstance(GRAPH.forward, WholeModel)
CONVOLUTIONS = {
    kernel.name: by_conv_row(kernel)
    for kernel in convolutions()
    if kernel is not CONV_REFERENCE and kernel.refuses(Geometry(16, 16, (1, 1))) is None
}


def states(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def step() -> list[Tensor]:
    model = deepcopy(MASKED)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(X).sum().backward()
    optimizer.step()
    return states(model)


def pruned(pattern: str = "2:4", **options: Any) -> list[Tensor]:
    return states(twofour.prune(deepcopy(DENSE), pattern, **options))


VERBS: dict[str, Callable[[], Any]] = {
    **{f"prune {pattern}": partial(pruned, pattern) for pattern in ("2:4", "2:4-transposable", "4:8-pairs", "4:2:8")},
    **{f"prune {name}": partial(pruned, criterion=name, data=[X]) for name in ("wanda", "sparsegpt", "admm")},
    "prune permuted": partial(pruned, permute=True, example=X),
    **{f"forward {dtype}": partial(fast, X) for dtype, fast in FAST.items()},
    **{f"compile {dtype}": lambda dtype=dtype: quick(deepcopy(MASKED), X, dtype=dtype)(X) for dtype in FAST},
    "forward graph": lambda: GRAPH(X),
    "compile graph": lambda: quick(deepcopy(MASKED), X, graph=True)(X),
    "compile convolution": lambda: quick(deepcopy(CONV), IMAGE)(IMAGE),
    "save": lambda: twofour.save(FAST["float32"], f"{FOLDER}/again.safetensors"),
    "save masked": lambda: twofour.save(MASKED, f"{FOLDER}/masked.safetensors"),
    "load": lambda: twofour.load(f"{FOLDER}/fast.safetensors", deepcopy(DENSE))(X),
    "unpack": PACKED.unpack,
    "check": lambda: twofour.check(MASKED).ok,
    "check compiled": lambda: twofour.check(FAST["float32"]).ok,
    "check file": lambda: twofour.check(f"{FOLDER}/fast.safetensors").ok,
    "estimate": lambda: str(twofour.estimate(MASKED, X, machine="a100-sxm")),
    "step": step,
}
"""Calls whose operands are plain: only what surrounds them differs."""

CALLS: dict[str, tuple[Callable[[Any], Any], Tensor]] = {
    **{f"forward {dtype}": (fast, X) for dtype, fast in FAST.items()},
    "forward graph": (GRAPH, X),
    "convolution": (FAST_CONV, IMAGE),
    **{f"row {name}": (layer, X) for name, layer in (LIBRARIES | NATIVE).items()},
    **{f"row {name}": (layer, IMAGE) for name, layer in CONVOLUTIONS.items()},
    "matmul": (lambda x: twofour.kernels.matmul(x, PACKED), X),
    "attention": (lambda q: attention(q, Q, Q), Q),
    "norm": (lambda x: norm(x, None, None, 1e-5), X),
    "pack": (lambda w: pack(w, "2:4").unpack(), W),
    "project": (lambda w: parse("2:4").project(w), W),
    "project tiles": (lambda w: parse("2:4-transposable").project(w), W),
    "check pattern": (lambda w: parse("2:4").check(w).ok, W),
    "search": (lambda w: twofour.structure.permutation.search(w, "2:4", escapes=2).order, W.abs()),
}
"""Calls by the tensor they are given."""
LOOKED_AT_WHOLE = ("pack", "project", "project tiles", "check pattern", "search")
"""Calls that look at the storage behind a tensor: layers, attention and norm see no more than that there is none."""


@contextmanager
def default(set_to: Callable[[Any], None], value: Any) -> Any:
    set_to(value)
    yield


MODES: dict[str, Callable[[], Any]] = {
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default(torch.set_default_device, "meta"),
    "default float64": lambda: default(torch.set_default_dtype, torch.float64),
    "default bfloat16": lambda: default(torch.set_default_dtype, torch.bfloat16),
    "inference": torch.inference_mode,
}


def emptied(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def freed(x: Tensor) -> Tensor:
    return emptied(x.clone())


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "negated": torch._neg_view,
    "imaginary part": lambda x: torch.complex(x, x).conj().imag,
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "nested rows": lambda x: torch.nested.nested_tensor(list(x)),
    "sparse": Tensor.to_sparse,
    "mkldnn": Tensor.to_mkldnn,
    "strided": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.flatten()[0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x.as_strided(x.shape, [0] * x.ndim),
    "complex": lambda x: torch.complex(x, x),
    "whole": Tensor.int,
    "half": Tensor.half,
    "double": Tensor.double,
    "list": Tensor.tolist,
}
WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "zero": lambda x: torch._efficientzerotensor(x.shape),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "functional": torch._to_functional_tensor,
    "freed": freed,
    "freed behind strides": lambda x: emptied(torch.stack([x, x], -1)[..., 0]),
    "freed, with one more axis": lambda x: emptied(torch.stack([x, x]).transpose(0, 1)),
}


def shrunk(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(64)
    return x


def dual(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


def fake_mode(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with FakeTensorMode():
        return call(x)


def traced(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    return make_fx(call)(torch.randn_like(x).abs())(x)


AROUND: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "dual": dual,
    "vmap": lambda call, x: torch.vmap(call)(x[None])[0],
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[0],
    "gradient": lambda call, x: call(x.clone().requires_grad_()),
    "fake mode": fake_mode,
    "make_fx": traced,
}


def same(got: Any, want: Any) -> bool:
    got, want = (value if isinstance(value, list) else [value] for value in (got, want))
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, Tensor):
            if a != b:
                return False
        elif (
            type(a) not in (Tensor, nn.Parameter)
            or a.device != b.device
            or a.dtype != b.dtype
            or not torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2, equal_nan=True)
        ):
            return False
    return True


def under(mode: str, verb: str) -> tuple[Any, Any]:
    torch.manual_seed(3)
    want = VERBS[verb]()
    torch.manual_seed(3)
    try:
        with MODES[mode]():
            return VERBS[verb](), want
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)


def with_x(mode: str, name: str) -> tuple[Any, Any]:
    call, x = CALLS[name]
    want = call(x)
    try:
        with MODES[mode]():
            return call(x), want
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)


def on(kind: str, name: str) -> tuple[Any, Any]:
    call, x = CALLS[name]
    odd = (KINDS | WRAPPED)[kind](x)
    got = call(odd)
    plain = (
        torch.zeros(x.shape)
        if kind == "zero"
        else odd.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return got, call(plain)


def on_shrunk(name: str) -> tuple[Any, Any]:
    call, x = CALLS[name]
    return call(shrunk(x)), None


def within(around: str, name: str) -> tuple[Any, Any]:
    call, x = CALLS[name]
    return AROUND[around](call, x), call(x)


def end_of(case: Callable[[], tuple[Any, Any]]) -> str:
    try:
        return "right" if same(*case()) else "another answer"
    except TwofourError:
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def ends_of(cases: dict[str, Callable[[], tuple[Any, Any]]]) -> dict[str, str]:
    """Run the cases in a forked child, and those behind one that ends it in another."""
    ends: dict[str, str] = {}
    while left := [name for name in cases if name not in ends]:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            for name in left:
                os.write(writer, f"{end_of(cases[name])}\n".encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            ends |= zip(left, pipe.read().decode().splitlines(), strict=False)
        _, status = os.waitpid(child, 0)
        if status and (missing := [name for name in left if name not in ends]):
            ends[missing[0]] = f"ended by signal {status & 127}"
    return ends


def cases() -> dict[str, Callable[[], tuple[Any, Any]]]:
    found = {f"{verb} / {mode}": partial(under, mode, verb) for verb in VERBS for mode in MODES}
    del found["step / inference"]  # torch's own backward pass refuses there
    found |= {f"{name} / {kind}": partial(on, kind, name) for name in CALLS for kind in KINDS}
    found |= {f"{name} / {mode}": partial(with_x, mode, name) for name in CALLS.keys() - VERBS.keys() for mode in MODES}
    found |= {f"{name} / {kind}": partial(on, kind, name) for name in CALLS for kind in WRAPPED}
    found |= {f"{name} / shrunk": partial(on_shrunk, name) for name in LOOKED_AT_WHOLE}
    return found | {f"{name} / {around}": partial(within, around, name) for name in CALLS for around in AROUND}


if __name__ == "__main__":
    wanted = "/ " + "".join(sys.argv[1:])
    json.dump(ends_of({name: case for name, case in cases().items() if wanted in name}), sys.stdout)

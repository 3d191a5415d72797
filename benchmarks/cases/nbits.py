"""ONNX Runtime's product with weights of 2, 4 or 8 bits in groups, `MatMulNBits`: the peer of our grouped rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from twofour.errors import MeasureError
from twofour.kernels.bits_matmul import BitWeight

NAME, SHORT = "ONNX Runtime MatMulNBits", "MatMulNBits"

LEVELS = {True: 4, False: 0}
"""Whether inputs are rounded -> `accuracy_level`: 4 rounds them to 8 bits in each group, 0 leaves them float32."""

NEAR = {True: 0.03, False: 1e-4}
"""How far its answer may lie from the real product, as a share of it: groups of inputs of 8 bits, or none rounded."""


def calls(weight: BitWeight, x: Tensor, *, rounded: bool, copies: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield "" and its product with a copy of a weight on one thread, checked; nothing where it has none such.

    Args:
        weight: Two's complement of 2, 4 or 8 bits with groups, without zero points: its own default.
        x: float32 (tokens, in).
        rounded: Whether it may round inputs.
        copies: Sessions, each with a weight of its own.

    Raises:
        MeasureError: Its answer is another.
    """
    twos = weight.levels.alpha == 1 and weight.levels.beta == -(1 << (weight.levels.bits - 1))
    fits = weight.group and not weight.shifted and twos and weight.levels.bits in (2, 4, 8)
    if not fits or importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return
    given, want = {"x": x.numpy()}, x.double() @ weight.real().double().T
    model = _model(weight, LEVELS[rounded])
    for index in range(copies):
        session = _session(model)
        if index == 0:
            answer = torch.from_numpy(session.run(None, given)[0]).double()
            if (answer - want).norm() > NEAR[rounded] * want.norm():
                raise MeasureError(
                    f"{NAME} is wrong and is not timed", got=f"{weight.levels}, groups of {weight.group}"
                )
        yield "", lambda session=session: session.run(None, given)


def _model(weight: BitWeight, level: int) -> bytes:
    from onnx import TensorProto, helper

    (rows, columns), bits, group = weight.shape, weight.levels.bits, weight.group
    per = 8 // bits
    parts = weight.codes.view(rows, columns // per, per)
    packed = torch.stack([parts[..., i] << (i * bits) for i in range(per)]).sum(0, dtype=torch.uint8)
    sizes = rows, columns // group, group * bits // 8
    held = [
        helper.make_tensor("w", TensorProto.UINT8, sizes, packed.numpy().tobytes(), raw=True),
        helper.make_tensor("s", TensorProto.FLOAT, (weight.scales.numel(),), weight.scales.numpy().tobytes(), raw=True),
    ]
    options = {"K": columns, "N": rows, "bits": bits, "block_size": group, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **options)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", None]) for name in ("x", "y")]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], held)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9).SerializeToString()


def _session(model: bytes) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

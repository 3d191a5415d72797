"""MatMul by a constant -> Gemm, for TensorRT 8, which took sparse tactics for Gemm alone (NVIDIA/TensorRT#2271).

TensorRT 10 takes them for MatMul too, and the Reshape around a Gemm costs time there (onnxsim/onnxsim#1764, measured on
TensorRT 10.3): so this is done on request.
"""

from __future__ import annotations

from typing import Any

from twofour.export.onnx.weights import add_constant


def matmul_to_gemm(graph: Any) -> int:
    """Rewrite each MatMul(x, W), W a constant (in, out), as Gemm with W (out, in), its bias taken in; return how many.

    Where x has more than two axes, Reshape puts all but the last into one, and back.
    """
    count, turned = 0, dict[int, Any]()
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain not in ("", "ai.onnx"):
            continue
        x, weight = node.inputs
        if weight is None or weight.const_value is None or not weight.is_initializer() or x is None or x.shape is None:
            continue
        if len(weight.const_value.shape) != 2:
            continue
        if id(weight) not in turned:
            # (out, in), of a name of its own; `weights.find` names it after its parameter
            turned[id(weight)] = add_constant(graph, f"{weight.name}.gemm", weight.const_value.numpy().T.copy())
        _rewrite(graph, node, x, turned[id(weight)])
        if not weight.uses():
            graph.initializers.pop(weight.name)
        count += 1
    return count


def _rewrite(graph: Any, node: Any, x: Any, weight: Any) -> None:
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    def constant(name: str, values: list[int]) -> Any:
        made = ir.node("Constant", [], {"value_ints": values}, name=f"{out.name}_{name}")
        added.append(made)
        return made.outputs[0]

    def add(kind: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        made = ir.node(kind, inputs, attributes, name=f"{out.name}_{kind}")
        made.outputs[0].name = f"{out.name}_{kind}_out"
        added.append(made)
        return made.outputs[0]

    out, added = node.outputs[0], list[Any]()
    outputs, inputs = weight.const_value.shape
    bias, last = _bias(node, outputs)
    flat = len(x.shape) == 2
    rows = x if flat else add("Reshape", [x, constant("flat", [-1, inputs])], {})
    y = add("Gemm", [rows, weight, bias] if bias is not None else [rows, weight], {"transB": 1})
    if not flat:
        leading = add("Shape", [x], {"start": 0, "end": -1})
        shape = add("Concat", [leading, constant("last", [outputs])], {"axis": 0})
        y = add("Reshape", [y, shape], {})
        added[-1].name = f"{out.name}_back"
        y.name = f"{out.name}_back_out"
    graph.insert_before(node, added)
    final = last.outputs[0]
    y.shape, y.type = final.shape, final.type
    final.replace_all_uses_with(y, replace_graph_outputs=True)
    graph.remove([last, node] if last is not node else [node], safe=True)


def _bias(node: Any, outputs: int) -> tuple[Any, Any]:
    """Return the constant that is added right behind, and the node that adds it; None and the node where none is."""
    uses = node.outputs[0].uses()
    if len(uses) == 1 and not node.outputs[0].is_graph_output():
        after, position = uses[0]
        other = after.inputs[1 - position] if after.op_type == "Add" else None
        if other is not None and other.const_value is not None and tuple(other.const_value.shape) == (outputs,):
            return other, after
    return None, node

"""The wheel in an environment of onnxruntime and nothing else: a small model answers as with ONNX Runtime alone.

python tests/wheel/onnxruntime_ep.py
"""

from __future__ import annotations

import importlib.util
import struct
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_ep_twofour as twofour

INPUTS, OUTPUTS = 64, 96


def field(number: int, content: bytes | int) -> bytes:
    """Encode a field of protobuf: a number, or bytes with their length."""
    wire = 0 if isinstance(content, int) else 2
    value = varint(content) if isinstance(content, int) else varint(len(content)) + content
    return varint(number << 3 | wire) + value


def varint(number: int) -> bytes:
    """Encode a number, seven bits a byte."""
    parts = []
    while True:
        parts.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
        if number == 0:
            return bytes(parts)


def tensor(name: str, sizes: list[int]) -> bytes:
    """Encode a ValueInfoProto of float32."""
    shape = b"".join(field(1, field(1, size)) for size in sizes)
    return field(1, name.encode()) + field(2, field(1, field(1, 1) + field(2, shape)))


def model(weight: np.ndarray) -> bytes:
    """Encode a ModelProto by the field numbers of onnx.proto: y = Relu(Sin(x) W), without a package that writes one."""
    sine = field(1, b"x") + field(2, b"s") + field(4, b"Sin")  # of ONNX Runtime's own
    matmul = field(1, b"s") + field(1, b"w") + field(2, b"h") + field(4, b"MatMul")
    relu = field(1, b"h") + field(2, b"y") + field(4, b"Relu")
    values = struct.pack(f"<{weight.size}f", *weight.ravel())
    constant = field(1, weight.shape[0]) + field(1, weight.shape[1]) + field(2, 1) + field(8, b"w") + field(9, values)
    graph = field(1, sine) + field(1, matmul) + field(1, relu) + field(2, b"g") + field(5, constant)
    graph += field(11, tensor("x", [7, INPUTS])) + field(12, tensor("y", [7, OUTPUTS]))
    return field(1, 8) + field(7, graph) + field(8, field(1, b"") + field(2, 17))


def main() -> None:
    """Raise where anything is other than it has to be."""
    assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("twofour") is None
    random = np.random.default_rng(0)
    weight = random.standard_normal((INPUTS // 4, 4, OUTPUTS)).astype(np.float32)
    weight[:, 1:3] = 0
    x = random.standard_normal((7, INPUTS)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model(weight.reshape(INPUTS, OUTPUTS)))
        (wanted,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
        onnxruntime.register_execution_provider_library("twofour", twofour.get_library_path())
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == twofour.get_ep_name()]
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_provider_for_devices(devices, {"threads": "2"})
        session = onnxruntime.InferenceSession(path, options)
        (got,) = session.run(None, {"x": x})
    ask = getattr(session, "get_provider_graph_assignment_info", None)  # onnxruntime 1.24
    parts = {part.ep_name: len(part.get_nodes()) for part in ask()} if ask else "not told"
    assert ask is None or parts == {twofour.get_ep_name(): 2, "CPUExecutionProvider": 1}, parts
    assert twofour.get_ep_names() == [twofour.get_ep_name()] and twofour.get_ep_name() in session.get_providers()
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    print(f"onnxruntime {onnxruntime.__version__} answers as its CPU provider; nodes of each: {parts}")


if __name__ == "__main__":
    main()

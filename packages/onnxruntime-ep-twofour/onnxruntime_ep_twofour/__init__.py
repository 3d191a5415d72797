"""An execution provider for ONNX Runtime that runs ONNX files with 2:4 zeros on twofour's kernels.

    import onnxruntime
    import onnxruntime_ep_twofour as twofour

    onnxruntime.register_execution_provider_library("twofour", twofour.get_library_path())
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == twofour.get_ep_name()]
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices, {"threads": "1"})
    session = onnxruntime.InferenceSession("model.onnx", options)

Nothing but the library and these functions is here: neither Python's part of twofour nor torch is needed.
"""

from pathlib import Path

__all__ = ["get_ep_name", "get_ep_names", "get_library_path"]

_NAME = "TwoFourExecutionProvider"


def get_library_path() -> str:
    """Return the path of the library that ONNX Runtime registers."""
    names = ("libtwofour.so.1", "libtwofour.1.dylib")
    for path in (Path(__file__).with_name(name) for name in names):
        if path.is_file():
            return str(path)
    raise FileNotFoundError(f"{Path(__file__).parent} has none of {', '.join(names)}: install the package again")


def get_ep_name() -> str:
    """Return the provider's name, which its devices carry."""
    return _NAME


def get_ep_names() -> list[str]:
    """Return the names of all providers of the library."""
    return [_NAME]

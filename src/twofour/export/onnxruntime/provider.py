"""The execution provider for ONNX Runtime: registered, and added to a session's options."""

from __future__ import annotations

import re
from typing import Any

import torch

from twofour.errors import ExportError, absent
from twofour.export.runtime import library

NAME = "TwoFourExecutionProvider"
"""What ONNX Runtime calls it."""

OLDEST = (1, 23, 1)
"""The first ONNX Runtime whose plug-ins compile parts of a graph on the CPU: 1.23.0 takes them for other devices."""

MOST_THREADS = 1024

SPINNING = "session.intra_op.allow_spinning"
"""The entry of a session's options that lets ONNX Runtime's threads spin while they wait."""


def register() -> list[Any]:
    """Make the provider known to ONNX Runtime, once in a process, and return its `OrtEpDevice`s: the CPU.

    Raises:
        ExportError: onnxruntime is missing or older than 1.23.1, or the library was not built.
    """
    try:
        import onnxruntime
    except ImportError as error:
        what = "a provider for ONNX Runtime needs a package that is not installed"
        raise absent(ExportError, what, error, "onnxruntime", "onnx") from error
    version = tuple(int(number) for number in re.findall(r"\d+", onnxruntime.__version__)[:3])
    if version < OLDEST:
        raise ExportError(
            "this ONNX Runtime takes no provider from outside",
            got=f"onnxruntime {onnxruntime.__version__}",
            wanted="1.23.1 or newer",
            remedy='pip install --upgrade "onnxruntime>=1.23.1"',
        )
    if not (devices := _devices()):
        onnxruntime.register_execution_provider_library(NAME, str(library()))
        devices = _devices()
    return devices


def add_provider(options: Any, *, threads: int | None = None) -> Any:
    """Add the provider to options of a session, before ONNX Runtime's own, and return them.

    A session that is made with them runs products by 2:4 weights, what stands behind these and the attention between
    them with this package's kernels; all else, and a model without such weights, with ONNX Runtime's. Give the session
    no `providers` then: those alone would count. With more than one thread, those of ONNX Runtime no longer spin while
    they wait, unless the options say whether they do: they would take the cores.

        >>> import onnxruntime
        >>> add_provider(onnxruntime.SessionOptions(), threads=1).has_providers()
        True

    Args:
        options: onnxruntime.SessionOptions; changed.
        threads: Of the parts that run here, in a pool of their own; default: the options' `intra_op_num_threads`, or as
            many as torch uses where that is 0.

    Raises:
        ExportError: `threads` is not from 1 to 1024; or as `register`.
    """
    if threads is None:
        threads = options.intra_op_num_threads or torch.get_num_threads()
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST_THREADS:
        raise ExportError(
            "`threads` is impossible",
            got=repr(threads),
            wanted=f"a whole number from 1 to {MOST_THREADS}, or None",
            remedy="leave it out for the options' intra_op_num_threads",
        )
    if threads > 1 and not _has(options, SPINNING):
        options.add_session_config_entry(SPINNING, "0")
    options.add_provider_for_devices(register(), {"threads": str(threads)})
    return options


def _devices() -> list[Any]:
    import onnxruntime

    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]


def _has(options: Any, entry: str) -> bool:
    """Whether options have an entry: asked for one that is not there they raise."""
    try:
        options.get_session_config_entry(entry)
    except RuntimeError:
        return False
    return True

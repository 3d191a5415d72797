"""What torch writes and keeps beside a capture, for its developers: kept from the terminal, or not made at all."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import config as fx_config


@contextmanager
def quietly() -> Iterator[None]:
    """Let torch warn of nothing inside, which are its own deprecations, log nothing, keep no stack traces, no graph."""
    with warnings.catch_warnings(), without_torchs_log(), _without_stack_traces(), _forgetting():
        warnings.simplefilter("ignore")  # whatever fails raises
        yield


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Let torch keep no lines of Python with the nodes of a graph: nobody reads them here, and each is looked up."""
    before = getattr(fx_config, "do_not_emit_stack_traces", False)
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = before


@contextmanager
def _forgetting() -> Iterator[None]:
    """Let torch forget after a capture what it keeps for the next one.

    The nodes that values came from, for its messages: the whole graph with its weights. And what operators answered
    to sizes, with the symbols of these and all that is known of them.
    """
    try:
        yield
    finally:
        proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
        getattr(proxies, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()
        if clear := getattr(FakeTensorMode, "cache_clear", None):
            clear()


@contextmanager
def without_torchs_log() -> Iterator[None]:
    """Keep what torch logs of this thread's attempts, traces and the model's code, from the user's terminal.

    What matters of it is in the reason of a refusal. Whoever sets TORCH_LOGS wants to see all of it.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    thread = threading.get_ident()
    known = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "torch"]
    handlers = {handler for one in known for handler in one.handlers}

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    for handler in handlers:
        handler.addFilter(elsewhere)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(elsewhere)


class OthersAlone:
    """Standard error for all threads but this one: torch prints there how far a failing export came."""

    def __init__(self) -> None:
        self._thread, self._stream = threading.get_ident(), sys.stderr

    def write(self, text: str) -> int:
        """Write what another thread writes."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream itself."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

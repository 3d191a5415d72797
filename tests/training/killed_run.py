"""A run for test_checkpoint.py to kill: python -m tests.training.killed_run FOLDER -> a digest of the result."""

import hashlib
import json
import sys

import torch
from torch import nn

from tests.training.small import accuracy, noisy_loader, pair_of_models, recipe
from twofour.training import finetune


def main(folder: str) -> None:
    torch.set_num_threads(1)
    model, control = pair_of_models()
    arguments = recipe()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        print("step", flush=True)
        return nn.functional.cross_entropy(output, target)

    arguments["loss"] = loss
    result = finetune(
        model,
        noisy_loader(own_generator=True),
        **arguments,
        evaluate=accuracy,
        control=control,
        checkpoint=folder,
        checkpoint_every=2,
    )
    print("DIGEST", digest(result.to_dict(), model, control), flush=True)


def digest(result: dict, *models: nn.Module) -> str:
    """sha256 over everything but the working time."""
    result = json.loads(json.dumps(result))
    result.pop("seconds")
    for run in (result["sparse"], result["control"]):
        run.pop("seconds")
    parts = [json.dumps(result, sort_keys=True).encode()]
    parts += [t.numpy().tobytes() for model in models for t in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])

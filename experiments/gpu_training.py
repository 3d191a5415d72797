"""CIFAR-10 with a ResNet-18 on a GPU: 30 epochs dense, then 30 more 2:4 and dense (the control), and 30 with SDGP.

`python experiments/gpu_training.py OUT` writes one JSON file an arm; each epoch is kept, so a run that is stopped, by
`timeout` say, goes on where it was. Without a GPU it says so and ends with exit code 0. Data: TWOFOUR_DATA.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import twofour
from tasks.base import Batches, accuracy, one_cycle
from tasks.cifar10 import Cifar10
from twofour import training
from twofour.checkpoints import write_tensors
from twofour.files import replacing
from twofour.measure import gpu_facts, machine
from twofour.native import gpu
from twofour.training import sdgp

EPOCHS, BATCH, RATE = 30, 512, 0.4


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut, a 1x1 convolution where the size changes (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and inputs == outputs
        down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else down

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with the stem of small images: 3x3, no pooling; 11 M parameters. Computes in bfloat16 by autocast."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        self.layers = nn.Sequential(*(nn.Sequential(Block(i, o, stride), Block(o, o, 1)) for i, o, stride in sizes))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (n, 3, 32, 32) -> float32 scores (n, classes)."""
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.head(self.layers(self.stem(x)).mean((2, 3))).float()


class OnDevice(Cifar10):
    """The task's images on the device, augmented there, for a net that is trained from nothing."""

    border, rewound = "mean", False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.images, self.labels = (part.to(device) for part in self.train)
        self.held = tuple(part.to(device) for part in self.test)

    def batches(self) -> Batches:
        """Padded, cropped, flipped batches of 512."""
        return Batches(len(self.labels), BATCH, self._augmented)

    def _augmented(self, index: Tensor) -> tuple[Tensor, Tensor]:
        n = len(index)
        index = index.to(self.device)
        images = F.pad(self.images[index], (4,) * 4)
        flip, top, left = (torch.rand(n) < 0.5), *torch.randint(0, 9, (2, n))
        columns = torch.where(flip[:, None], torch.arange(31, -1, -1), torch.arange(32)) + left[:, None]
        rows = (top[:, None] + torch.arange(32)).to(self.device)[:, None, :, None]
        places = torch.arange(n, device=self.device)[:, None, None, None]
        channels = torch.arange(3, device=self.device)[:, None, None]
        cropped = images[places, channels, rows, columns.to(self.device)[:, None, None, :]]
        return cropped.contiguous(memory_format=torch.channels_last), self.labels[index]


def main(
    out: Annotated[Path, typer.Argument(help="Folder of results and checkpoints.")],
    only: Annotated[str, typer.Option(help="Arms, comma separated.")] = "dense,sparse,control,sdgp",
    epochs: Annotated[int, typer.Option(help="Of each training.")] = EPOCHS,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Run the arms that are missing, in this order: the second and third begin with the first one's weights."""
    if reason := gpu.unavailable():
        typer.echo(f"the GPU training is not run: this machine {reason}")
        return
    out.mkdir(parents=True, exist_ok=True)
    task = OnDevice(gpu.device())
    for arm in only.split(","):
        path = out / f"{arm}-{seed}.json"
        if not path.exists():
            run_arm(arm, task, out, epochs, seed)
        found = json.loads(path.read_text())
        typer.echo(f"{arm}: {found['accuracy']:.2f} % after {found['epochs']} epochs, {found['seconds']:.0f} s")


def run_arm(arm: str, task: OnDevice, out: Path, epochs: int, seed: int) -> None:
    """Train one arm and write what it found."""
    torch.manual_seed(seed)
    model = ResNet18().to(task.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    start = out / f"dense-{seed}.safetensors"
    handle = None
    if arm in ("sparse", "control"):
        from safetensors.torch import load_file

        model.load_state_dict(load_file(start))
    if arm == "sparse":
        twofour.prune(model, "2:4")
    if arm == "sdgp":
        handle = sdgp.attach(model, "2:4", mode="rescaled", seed=seed)
    run = trained(model, task, out, f"{arm}-{seed}", epochs, seed)
    found: dict[str, Any] = {"arm": arm, "seed": seed, "epochs": epochs, "accuracy": run.evaluation, **run.to_dict()}
    if handle is not None:
        handle.remove()
    if arm == "sparse":
        report = twofour.check(model)
        assert report.ok, report
    if arm == "dense":
        with replacing(start) as temporary:
            write_tensors(temporary, model.state_dict(), {})
    with replacing(out / f"{arm}-{seed}.json") as temporary:
        temporary.write_text(json.dumps({**found, "gpu": facts(task.device), "machine": machine()}, indent=1))


def trained(model: nn.Module, task: OnDevice, out: Path, name: str, epochs: int, seed: int) -> training.Run:
    """Train with SGD and one cycle; what is in `out` of an earlier, stopped run is taken up."""
    steps = len(task.batches()) * epochs

    def optimizer(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)

    evaluate: Callable[[nn.Module], float] = partial(_accuracy, task)
    return training.train(
        model,
        task.batches(),
        loss=partial(F.cross_entropy, label_smoothing=0.1),
        optimizer=optimizer,
        schedule=lambda made: one_cycle(made, steps),
        epochs=epochs,
        evaluate=evaluate,
        checkpoint=out / "checkpoints",
        seed=seed,
        name=name,
    )


def _accuracy(task: OnDevice, model: nn.Module) -> float:
    return accuracy(model, *task.held)


def facts(device: torch.device) -> dict[str, object] | None:
    """Return what the GPU is, or None on a CPU."""
    return gpu_facts() if device.type == "cuda" else None


if __name__ == "__main__":
    typer.run(main)

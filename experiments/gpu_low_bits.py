"""Nets of few bits that are trained on a GPU: those that the benchmarks time, each beside its float control.

`python experiments/gpu_low_bits.py OUT` writes a JSON file for each arm and seed, and of an arm of few bits its state
by `twofour.save`: whole numbers in their planes, scales, steps and norms. Finished arms are kept, and each epoch of
others, so that a run which was stopped goes on. Several processes may share OUT where they have different tasks, nets
or seeds. Data: TWOFOUR_DATA.

All are trained in bfloat16 by autocast, which holds whole numbers exactly, and evaluated in float32. Float nets are
trained by SGD, nets of few bits by Adam, for as many epochs of the same images.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch import nn

import twofour
from low_bit_nets import ARMS, FLOAT
from records import version
from tasks.base import one_cycle
from tasks.convnets import SOURCES, ConvNet, OutOfTime
from twofour import training
from twofour.checkpoints import write_tensors
from twofour.demo.convnets import NETS
from twofour.files import replacing
from twofour.measure import gpu_facts, machine
from twofour.native import gpu

START = "start"
WIDTHS = ("w1a1", "w1a2", "w2a2")


def main(
    out: Annotated[Path, typer.Argument(help="Folder of results, states and checkpoints.")],
    only: Annotated[str, typer.Option(help="Arms, comma separated; the start comes by itself.")] = ",".join(
        (FLOAT, *WIDTHS)
    ),
    task: Annotated[str, typer.Option(help="Data sets, comma separated.")] = ",".join(SOURCES),
    nets: Annotated[str, typer.Option(help=f"Of {', '.join(NETS)}.")] = "vgg,resnet18",
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    epochs: Annotated[int, typer.Option(help="Of each training after the start.")] = ConvNet.epochs,
    start_epochs: Annotated[int, typer.Option(help="Of the float net that all others start from.")] = (
        ConvNet.start_epochs
    ),
    taught: Annotated[bool, typer.Option(help="Whether the start teaches the others, the control too.")] = True,
    seconds: Annotated[float, typer.Option(help="After which no epoch begins.")] = float("inf"),
    batch: Annotated[int, typer.Option(help="Images of a step.")] = ConvNet.batch,
    rate: Annotated[float, typer.Option(help="The highest learning rate of nets of few bits.")] = ConvNet.low_rate,
    halves: Annotated[bool, typer.Option(help="Whether nets multiply in bfloat16 while they are trained.")] = True,
    keep: Annotated[bool, typer.Option(help="Whether epochs of arms that are not finished are kept.")] = True,
    images: Annotated[int, typer.Option(help="Training images, the first ones; 0 for all.")] = 0,
    held: Annotated[int, typer.Option(help="Test images, 0 for all; for trials.")] = 0,
    device: Annotated[str, typer.Option(help="cuda; cpu for trials.")] = "cuda",
) -> None:
    """Train the arms that are missing, seed by seed."""
    deadline = time.monotonic() + seconds
    if device == "cuda" and (reason := gpu.unavailable()):
        typer.echo(f"the GPU training is not run: this machine {reason}")
        return
    arms = only.split(",")
    if unknown := [arm for arm in arms if arm not in (FLOAT, *WIDTHS)]:
        raise typer.BadParameter(f"{unknown[0]!r}: arms are {', '.join((FLOAT, *WIDTHS))}")
    tasks = [
        ConvNet(source, net, device, images=images or None, held=held or None, deadline=deadline)
        for source in task.split(",")
        for net in nets.split(",")
    ]
    for subject in tasks:
        subject.epochs, subject.start_epochs, subject.taught = epochs, start_epochs, taught
        subject.batch, subject.halves, subject.low_rate = batch, halves, rate
    out.mkdir(parents=True, exist_ok=True)
    try:
        for seed in map(int, seeds.split(",")):
            for subject in tasks:
                for arm in (START, *arms):
                    if not (path := out / f"{subject.name}-{arm}-{seed}.json").exists():
                        run_arm(arm, subject, out, seed, keep=keep)
                    found = json.loads(path.read_text())
                    typer.echo(
                        f"{subject.name} seed {seed}: {arm}: {found['value']:.2f} % after {found['epochs']} epochs, "
                        f"{found['seconds']:.0f} s"
                    )
    except OutOfTime:
        typer.echo(f"stopped after {seconds:.0f} s; give the same command again to go on")


def run_arm(arm: str, task: ConvNet, out: Path, seed: int, *, keep: bool = True) -> None:
    """Train one arm and write what it found, and its state."""
    begin = time.perf_counter()
    name, start = f"{task.name}-{arm}-{seed}", out / "starts" / f"{task.name}-{seed}.safetensors"
    start.parent.mkdir(exist_ok=True)
    model, teacher = task.network(seed), None
    found: dict[str, Any] = {"task": task.name, "arm": arm, "seed": seed, "taught": False}
    found |= {"images": len(task.train[1]), "batch": task.batch, "halves": task.halves, "recipe": task.recipe}
    if arm != START:
        model.load_state_dict(load_file(start))
        found["dense"] = found["one_shot"] = json.loads((out / f"{task.name}-{START}-{seed}.json").read_text())["value"]
        if task.taught:
            teacher = task.network(seed)
            teacher.load_state_dict(load_file(start))
            teacher, found["taught"] = _channels_last(teacher), True
    model = _channels_last(model)
    if ARMS.get(arm) is not None:
        twofour.quantize(model.eval(), *_widths(arm), data=task.calibration(), samples=1000)
        found["one_shot"] = _evaluated(task, model)
    checkpoints = out / "checkpoints" / name if keep else None
    run = _trained(task, model, teacher, checkpoints, name, seed, arm)
    value = _evaluated(task, model)
    found |= {"value": value, "epochs": len(run.history), "start_epochs": task.start_epochs, "training": run.to_dict()}
    if arm == START:
        with replacing(start) as temporary:
            write_tensors(temporary, {key: part.cpu() for key, part in model.state_dict().items()}, {})
    elif arm != FLOAT:
        twofour.save(model.cpu(), out / f"{name}.safetensors")
    found |= {"seconds": time.perf_counter() - begin, "commit": version(), "metric": asdict(task.metric)}
    found |= {"gpu": gpu_facts() if task.device.type == "cuda" else None, "machine": machine()}
    with replacing(out / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(found, indent=1))


def _widths(arm: str) -> tuple[str, str]:
    found = ARMS[arm]
    assert found is not None and found.learned
    return found.weights, found.inputs


def _channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _evaluated(task: ConvNet, model: nn.Module) -> float:
    with torch.no_grad():
        return task.evaluate(model.eval())


def _trained(
    task: ConvNet,
    model: nn.Module,
    teacher: nn.Module | None,
    checkpoints: Path | None,
    name: str,
    seed: int,
    arm: str,
) -> training.Run:
    """Train with one cycle; what is in `checkpoints` of an earlier, stopped run is taken up."""
    epochs = task.start_epochs if arm == START else task.epochs
    loader = task.loader(seed)
    with (
        torch.autocast(task.device.type, torch.bfloat16, enabled=task.halves),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
    ):
        return training.train(
            model,
            loader,
            loss=task.loss,
            optimizer=task.low_bit_optimizer if ARMS.get(arm) else task.optimizer,
            schedule=lambda made: one_cycle(made, epochs * len(loader)),
            epochs=epochs,
            checkpoint=checkpoints,
            clip_norm=1.0,
            seed=seed,
            name=name,
            teacher=teacher,
        )


if __name__ == "__main__":
    typer.run(main)

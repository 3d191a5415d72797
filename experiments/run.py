"""Accuracy with controls: `run.py task NAME` and `gradients NAME` measure, `run.py page` writes docs/results.md."""

from __future__ import annotations

import copy
import fnmatch
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import block_rnn
import dial_command
import gradients as pruned_gradients
import low_bit_nets
import low_bit_states
import page as results_page
import shrink_encoder
import shrink_nets
import twofour
from arms import BARE, FOLLOW_LOSS, HELD_BACK, Arm, again, built, one_shot
from cost import Cost
from records import SCRATCH, Brought, Nearness, Records, Row, Run, Shrunk, Trained, version
from tasks import BLOCKS, CONVNETS, GRADIENTS, LOW_BITS, SHRINK, TASKS, Task
from tasks.base import Batches
from twofour import training
from twofour.calibration import to_device
from twofour.checkpoints import write_tensors
from twofour.errors import TwofourError
from twofour.files import replacing
from twofour.native import gpu

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console(stderr=True)

SHRUNK_BY = {"shrink-fashion": shrink_nets, "shrink-cifar10": shrink_nets, "shrink-stsb": shrink_encoder}
"""Task -> what makes its rows: `arms(task)`, their keys, and `measured(task, seed, kept)`, all that are not kept."""

Keyed = TypeVar("Keyed", pruned_gradients.Rule, block_rnn.Arm)


@app.command()
def task(
    name: Annotated[str, typer.Argument(help=f"{', '.join(TASKS)}")],
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    stage: Annotated[str, typer.Option(help="one-shot, again or all.")] = "all",
    only: Annotated[str, typer.Option(help="Globs of row names, comma separated: '2:4 *'.")] = "*",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    device: Annotated[str, typer.Option(help="On which models are pruned, trained and answer: cuda, say.")] = "cpu",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure rows again that the record has.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Measure the rows of one task; a stopped run goes on where it stopped."""
    if name not in TASKS or stage not in ("one-shot", "again", "all"):
        raise typer.BadParameter(
            f"{name!r}, stage {stage!r}: tasks are {', '.join(TASKS)}; stages one-shot, again, all"
        )
    if threads:
        torch.set_num_threads(threads)
    if device.startswith("cuda") and (reason := gpu.unavailable()):
        raise typer.BadParameter(f"{device!r}: this machine {reason}")
    subject = TASKS[name]()
    subject.device = torch.device(device)
    records = Records(name, asdict(subject.metric), record)
    arms = [
        arm for arm in (*one_shot(subject), *again(subject)) if stage in ("all", "again" if arm.again else "one-shot")
    ]
    for seed in map(int, seeds.split(",")):
        for arm in _wanted(arms, only.split(","), subject, seed):
            if not fresh and (arm.key, seed) in records.rows:
                continue
            row = measured(subject, arm, seed)
            records.add(row)
            sign = subject.metric.unit
            console.print(f"{name} seed {seed}: {arm.key}: dense {row.dense:.2f}{sign}, now {row.value:.2f}{sign}")


@app.command()
def gradients(
    name: Annotated[str, typer.Argument(help="cifar10, cifar10-short or wikitext.")],
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    only: Annotated[str, typer.Option(help="Globs of rows, comma separated: 'dense,2:4 *'.")] = "*",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Train from scratch with dL/dz pruned (SDGP), and dense; a stopped run goes on where it stopped."""
    if f"gradients-{name}" not in GRADIENTS:
        raise typer.BadParameter(f"{name!r}: wanted {' or '.join(task[10:] for task in GRADIENTS)}")
    subject = GRADIENTS[f"gradients-{name}"]()
    records = Records(subject.name, asdict(subject.metric), record, Run)
    for rule, seed in _missing(records, pruned_gradients.RULES, seeds, only, threads):
        run = pruned_gradients.measured(subject, rule, seed)
        records.add(run)
        console.print(f"{name} seed {seed}: {rule.key}: {run.value:.2f}{subject.metric.unit}")


@app.command()
def nearness(
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """How near pruned gradients of one batch come to exact ones, layer by layer: minutes, all seeds together."""
    if threads:
        torch.set_num_threads(threads)
    subject = GRADIENTS["gradients-cifar10"]()
    records = Records("gradients-nearness", {}, record, Nearness)
    for seed in map(int, seeds.split(",")):
        for row in pruned_gradients.nearness(subject, seed):
            records.add(row)
            console.print(f"seed {seed}: {row.key}: size {row.size:.3f}, cosine {row.cosine:.3f}, {row.lowest:.3f}")


@app.command()
def blocks(
    name: Annotated[str, typer.Argument(help=", ".join(name.removeprefix("blocks-") for name in BLOCKS))],
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    only: Annotated[
        str, typer.Option(help="Globs of rows, comma separated: '4x4 *'; the dense net comes first.")
    ] = "*",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Train recurrent nets that lose blocks meanwhile, and dense ones; a stopped run goes on where it stopped."""
    if f"blocks-{name}" not in BLOCKS:
        raise typer.BadParameter(f"{name!r}: wanted {', '.join(task.removeprefix('blocks-') for task in BLOCKS)}")
    subject = BLOCKS[f"blocks-{name}"]()
    records = Records(subject.name, asdict(subject.metric), record, Trained)
    for arm, seed in _missing(records, block_rnn.ARMS, seeds, f"{block_rnn.DENSE.key},{only}", threads):
        row = block_rnn.measured(subject, arm, seed, list(records.rows.values()))
        records.add(row)
        console.print(f"{name} seed {seed}: {arm.key}: {row.value:.3f} at {100 * row.sparsity:.1f} % zeros")


@app.command()
def shrink(
    name: Annotated[str, typer.Argument(help=", ".join(name.removeprefix("shrink-") for name in SHRINK))],
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Train nets that lose channels, and dense ones as long; a stopped run goes on."""
    if f"shrink-{name}" not in SHRINK:
        raise typer.BadParameter(f"{name!r}: wanted {', '.join(task.removeprefix('shrink-') for task in SHRINK)}")
    if threads:
        torch.set_num_threads(threads)
    subject = SHRINK[f"shrink-{name}"]()
    records = Records(subject.name, asdict(subject.metric), record, Shrunk)
    made: Any = SHRUNK_BY[subject.name]
    arms = made.arms(subject)
    for seed in map(int, seeds.split(",")):
        kept = {key: records.rows[key, seed] for key in arms if (key, seed) in records.rows}
        for row in made.measured(subject, seed, kept) if len(kept) < len(arms) else ():
            records.add(row)
            console.print(f"{name} seed {seed}: {row.key}: {row.value:.2f} with {row.parameters:,} parameters")


@app.command("low-bits")
def low_bits(
    name: Annotated[str, typer.Argument(help=", ".join(LOW_BITS))] = "fashion",
    seeds: Annotated[str, typer.Option(help="Comma separated.")] = "0,1,2",
    only: Annotated[str, typer.Option(help="Globs of rows, comma separated: 'float,w1*'.")] = "*",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Train nets of few bits and their float control; a stopped run goes on where it stopped."""
    if name not in LOW_BITS:
        raise typer.BadParameter(f"{name!r}: wanted {', '.join(LOW_BITS)}")
    if threads:
        torch.set_num_threads(threads)
    subject = LOW_BITS[name]()
    records = Records(f"low-bits-{name}", asdict(subject.metric), record)
    dense: dict[int, float] = {}  # by the seed that the float net depends on
    for seed in map(int, seeds.split(",")):
        for key in (low_bit_nets.FLOAT, *subject.low_bits):
            if (key, seed) in records.rows or not any(fnmatch.fnmatch(key, glob) for glob in only.split(",")):
                continue
            model, of = dense_model(subject, seed), 0 if subject.pretrained else seed
            if of not in dense:
                dense[of] = _evaluated(subject, model)
            row = low_bit_nets.measured(subject, model, key, seed, dense[of], _evaluated, _trained)
            records.add(row)
            console.print(
                f"{name} seed {seed}: {key}: dense {row.dense:.2f}, rounded {row.one_shot:.2f}, {row.value:.2f}"
            )


@app.command("low-bits-from-gpu")
def low_bits_from_gpu(
    folder: Annotated[Path, typer.Argument(help="What gpu_low_bits.py wrote.")],
    only: Annotated[str, typer.Option(help="Globs of tasks, comma separated: 'fashion-*'.")] = "*",
    whole: Annotated[int, typer.Option(help="Test images that 64-bit whole numbers answer.")] = 500,
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Keep the rows in experiments/records, in git.")] = False,
) -> None:
    """Answer all test images by nets that a GPU trained, in three ways to the same bits; a stopped run goes on."""
    if threads:
        torch.set_num_threads(threads)
    of: dict[str, list[dict[str, Any]]] = {}
    for one in low_bit_states.brought(folder):
        if any(fnmatch.fnmatch(one["task"], glob) for glob in only.split(",")):
            of.setdefault(one["task"], []).append(one)
    for name, found in of.items():
        records = Records(f"low-bits-{name}", asdict(CONVNETS[name]().metric), record, Brought)
        low_bit_states.require_alike(found, records.rows.values())
        missing = [one for one in found if (one["arm"], one["seed"]) not in records.rows]
        for row in low_bit_states.rows(folder, missing, _evaluated, whole):
            records.add(row)
            console.print(
                f"{name} seed {row.seed}: {row.key}: {row.value:.2f}, there {row.there:.2f}; the same bits to "
                f"{row.answers} images by compiled kernels, {row.whole} in whole numbers"
            )


@app.command()
def page() -> None:
    """Write docs/results.md from experiments/records."""
    console.print(f"wrote {results_page.write()}")


def _missing(
    records: Records[Any], rows: Sequence[Keyed], seeds: str, only: str, threads: int
) -> Iterator[tuple[Keyed, int]]:
    """Set the threads, and yield the rows that globs name and the record does not have, seed by seed."""
    if threads:
        torch.set_num_threads(threads)
    for seed in map(int, seeds.split(",")):
        for row in rows:
            if (row.key, seed) not in records.rows and any(fnmatch.fnmatch(row.key, glob) for glob in only.split(",")):
                yield row, seed


def _wanted(arms: Sequence[Arm], globs: Sequence[str], subject: Task, seed: int) -> list[Arm]:
    """One-shot rows of a published checkpoint do not depend on the seed, but for random masks."""
    kept = []
    for arm in arms:
        if not any(fnmatch.fnmatch(arm.name, glob) for glob in globs):
            continue
        drawn = arm.drawn or arm.criterion in ("random", *FOLLOW_LOSS)
        if not arm.again and seed and subject.pretrained and not drawn:
            continue
        if arm.criterion and not arm.whole and not built(arm.criterion):
            console.print(f"left out: {arm.name}: this version has no criterion {arm.criterion!r}")
            continue
        kept.append(arm)
    return kept


def measured(subject: Task, arm: Arm, seed: int) -> Row:
    """Make one row: the dense model, pruned, and trained again where the arm says so, or trained and pruned last."""
    if arm.whole:
        return _whole(subject, arm, seed)
    model = dense_model(subject, seed)
    dense = _evaluated(subject, model)
    control = _kept_control(subject, seed) if arm.last or arm.taught else None
    beside = None if control is None else _evaluated(subject, control)
    model = control if arm.last and control is not None else model
    torch.manual_seed(seed)
    given = arm.drawn_for(subject, seed)  # a data set that is read for the first time is no cost of pruning
    with Cost() as cost:
        arm.apply(model, subject, seed, given)
    seconds = cost.seconds
    one_shot = value = _evaluated(subject, model) if arm.criterion else dense
    if arm.again and not arm.last:
        begin = time.perf_counter()
        subject.before_again(model, seed)
        value = _trained(subject, model, seed, arm.name, control)
        seconds += time.perf_counter() - begin
    epochs = subject.epochs if arm.again else 0
    here = arm.criterion and subject.device.type == "cpu"
    kept = (cost.processor, cost.memory) if here else (None, None)
    parts = {"gpu": _gpu(subject), "control": beside}
    return Row(arm.key, seed, dense, one_shot, value, seconds, epochs, version(), *kept, **parts)


def _whole(subject: Task, arm: Arm, seed: int) -> Row:
    """Make the row of a model that `twofour.finetune` is given dense."""
    model = dense_model(subject, seed)
    dense = _evaluated(subject, model)
    kept = _kept_control(subject, seed) if arm.taught else None
    loader, held = subject.loader(seed), None
    if arm.criterion == HELD_BACK and isinstance(loader, Batches):
        loader, held = loader.hold_back(seed)
    original = {"optimizer": subject.optimizer, "schedule": subject.schedule, "clip_norm": 1.0}
    begin = time.perf_counter()
    subject.before_again(model, seed)
    folder = SCRATCH / f"running-{subject.name}-{''.join(c if c.isalnum() else '-' for c in arm.name)}-seed-{seed}"
    result = twofour.finetune(
        model,
        loader,
        checkpoint=folder,
        loss=subject.loss,
        epochs=subject.epochs,
        evaluate=lambda model: _answered(subject, model),
        seed=seed,
        held=held,
        **_beside(arm, model, kept),
        pattern=arm.pattern,
        prune={"skip": subject.skip, "eligibility": subject.eligibility},
        **({} if arm.criterion == BARE else original),
    )
    seconds = time.perf_counter() - begin
    for note in result.notes:
        console.print(f"  {note}", highlight=False)
    one_shot: Any = result.sparse.before
    control: Any = None if result.control is None else result.control.evaluation
    control = control if kept is None else _evaluated(subject, kept)
    beside = {"control": control, "instead": result.sparse.instead is not None, "gpu": _gpu(subject)}
    value = _evaluated(subject, model)
    shutil.rmtree(folder)  # of a row that is finished
    return Row(arm.key, seed, dense, one_shot, value, seconds, subject.epochs, version(), **beside)


def _beside(arm: Arm, model: nn.Module, kept: nn.Module | None) -> dict[str, Any]:
    """Return the control and the teacher that `twofour.finetune` is given: without an optimiser it makes none."""
    if arm.own:
        return {"control": copy.deepcopy(model)} if arm.criterion == BARE else {}
    return {"control": None, "teacher": kept}


def dense_model(subject: Task, seed: int) -> nn.Module:
    """The converged dense model: published, or trained here once per seed and kept in runs/."""
    model = subject.network(seed).to(subject.device)
    if subject.pretrained:
        return model
    path = SCRATCH / f"{subject.name}-dense-{subject.epochs}-epochs-seed-{seed}.safetensors"
    if not path.exists():
        _trained(subject, model, seed + 1000, "dense")
        _keep(model, path)
    model.load_state_dict(load_file(path))
    return model


def _kept_control(subject: Task, seed: int) -> nn.Module:
    """Return the control after its training, trained here once per seed and kept in runs/."""
    model = dense_model(subject, seed)
    path = SCRATCH / f"{subject.name}-control-{subject.epochs}-epochs-seed-{seed}.safetensors"
    if not path.exists():
        subject.before_again(model, seed)
        _trained(subject, model, seed, "control")
        _keep(model, path)
    model.load_state_dict(load_file(path))
    return model


def _keep(model: nn.Module, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        write_tensors(temporary, model.state_dict(), {})


def _trained(subject: Task, model: nn.Module, seed: int, name: str, teacher: nn.Module | None = None) -> float:
    training.train(
        model,
        subject.loader(seed),
        loss=subject.loss,
        optimizer=subject.optimizer,
        schedule=subject.schedule,
        epochs=subject.epochs,
        seed=seed,
        clip_norm=1.0,
        name=name.replace(":", "-"),
        teacher=teacher,
    )
    return _evaluated(subject, model)


def _evaluated(subject: Task, model: nn.Module) -> float:
    model.eval()
    with torch.inference_mode():
        return _answered(subject, model)


def _answered(subject: Task, model: nn.Module) -> float:
    """Evaluate a model where it is: tasks hold their test data, and what models answer, in the processor's memory."""
    if subject.device.type == "cpu":
        return subject.evaluate(model)
    there = model.register_forward_pre_hook(lambda _, args: to_device(args, subject.device))
    back = model.register_forward_hook(lambda _, args, answer: answer.cpu())
    try:
        return subject.evaluate(model)
    finally:
        there.remove()
        back.remove()


def _gpu(subject: Task) -> str | None:
    return None if subject.device.type == "cpu" else torch.cuda.get_device_name(subject.device)


dial_command.add(app, dense_model)


def main() -> None:
    """Run the command line; our own errors are printed without a traceback."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        app()
    except TwofourError as error:
        console.print(f"[red]error:[/red] {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The main job from end to end: train dense, train again, prune, train sparse, compile, measure, save."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from twofour import measure, report
from twofour.checker import check
from twofour.compiler import compile as compile_model
from twofour.demo import data as datasets
from twofour.demo.data import Images
from twofour.demo.folder import run_folder
from twofour.demo.network import VisionTransformer
from twofour.demo.settings import SETTINGS, Settings
from twofour.demo.settings import quick as quickened
from twofour.demo.summary import BEST_DENSE, EAGER, OURS, Difference, Summary
from twofour.errors import DataError, one_of
from twofour.export import load, save
from twofour.files import replacing
from twofour.measure import Record
from twofour.progress import Progress
from twofour.pruning import prune
from twofour.recipe import Recipe
from twofour.training import Result, Run, finetune, train

RECIPE = Recipe.parse("2:4")


@dataclass(frozen=True)
class Job:
    """One run of the demo: what it works on and where it writes."""

    images: Images
    settings: Settings
    seed: int
    folder: Path
    progress: bool

    @property
    def tokens(self) -> list[int]:
        """Token counts that the batch sizes mean for the layers; the head sees one token per image."""
        patches, batches = (self.images.side // self.settings.patch) ** 2, self.settings.batches
        return sorted({*batches, *(batch * patches for batch in batches)})

    def say(self, text: str) -> None:
        """Print a line of progress on standard error."""
        if self.progress:
            from rich.console import Console

            Console(stderr=True).print(text, markup=False, highlight=False)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Say what is being done and, after it, how long it took."""
        started = time.perf_counter()
        self.say(text)
        yield
        self.say(f"      {time.perf_counter() - started:.1f} s")


def demo(
    data: str = "digits",
    out: str | Path | None = None,
    seed: int = 0,
    quick: bool = False,
    progress: bool = True,
) -> Summary:
    """Run the whole pipeline on real data, print one table and leave a folder with the results.

    A vision transformer is trained dense, pruned 2:4 by magnitude, and trained again sparse with the same recipe, data
    order and seed; the dense model is trained again beside it as the control. Then three models are timed side by
    side: the control as it is, the control on the best dense kernels, and the sparse one.

    Args:
        data: "digits" (scikit-learn's 8x8 handwritten digits) or "fashion-mnist" (IDX files in a data folder).
        out: New or empty folder for model.safetensors, records.json, recipe.toml, summary.json and summary.txt, or one
            that the same run left when it was stopped: it starts again there; runs/demo-<data>-<time> when None.
        seed: Seed of the split, the weights and the data order.
        quick: A few seconds instead of a minute, with a network too small to judge.
        progress: Show progress on standard error.

    Raises:
        DataError: The data is unknown, missing or malformed, or `out` holds something else.
    """
    started = time.perf_counter()
    one_of("the demo does not know this data", data, SETTINGS, DataError)
    settings = quickened(SETTINGS[data]) if quick else SETTINGS[data]
    images = datasets.load(data, train=settings.train, test=settings.test, seed=seed)
    with run_folder(out, {"data": data, "seed": seed, "quick": quick}) as folder:
        summary = run_all(Job(images, settings, seed, folder, progress), data, quick, started)
        finish(summary)
    return summary


def run_all(job: Job, data: str, quick: bool, started: float) -> Summary:
    """Every step but the last, which writes the summary."""
    images = job.images
    model, control, dense, result = train_models(job)
    fast, latency = compile_and_measure(job, model, control)
    file = job.folder / "model.safetensors"
    loaded = save_and_load(job, model, file)
    answers = {name: predict(m, images.test) for name, m in (("sparse", model), ("control", control))}
    right = {name: (answer == images.test_labels).tolist() for name, answer in answers.items()}
    return Summary(
        data=data,
        accuracy=accuracies(dense, result),
        test=len(images.test),
        difference=Difference.of(right["sparse"], right["control"]),
        agreement=float((predict(loaded, images.test) == answers["sparse"]).float().mean()),
        bytes_dense=len(safetensors.torch.save(control.state_dict())),
        bytes_packed=file.stat().st_size,
        latency=latency,
        training=result,
        plan=fast.plan,
        masks=check(model),
        seconds=time.perf_counter() - started,
        seed=job.seed,
        folder=job.folder,
        quick=quick,
    )


def save_and_load(job: Job, model: nn.Module, file: Path) -> nn.Module:
    """The packed file, read back into a network with other weights."""
    with job.step("[5/5] saving the packed model and loading it again"):
        save(model, file)
        return load(file, network(job, job.seed + 1), tokens=job.tokens)


def train_models(job: Job) -> tuple[nn.Module, nn.Module, Run, Result]:
    """The sparse model, its control, the first dense training, and the second one of both."""
    settings, images = job.settings, job.images
    loader = DataLoader(TensorDataset(images.train, images.train_labels), settings.batch, shuffle=True)
    steps = settings.epochs * len(loader)
    again: dict[str, Any] = {
        "loader": loader,
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: torch.optim.AdamW(params, settings.lr, weight_decay=settings.weight_decay),
        "schedule": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, settings.lr, total_steps=steps),
        "epochs": settings.epochs,
        "evaluate": partial(accuracy, images=images),
        "seed": job.seed,
        "progress": job.progress,
    }
    job.say(f"[1/5] training dense: {len(images.train):,} images, {settings.epochs} epochs")
    model = network(job, job.seed)
    dense = train(model, **again)
    control = copy.deepcopy(model)
    prune(model, RECIPE)
    job.say("[2/5] pruned to 2:4; training it again sparse, and dense as its control")
    return model, control, dense, finetune(model, control=control, **again)


def compile_and_measure(job: Job, model: nn.Module, control: nn.Module) -> tuple[Any, dict[int, Record]]:
    """The compiled sparse model, and the comparison of the three models at each batch size."""
    test = job.images.test
    with job.step("[3/5] compiling: every kernel is measured at every layer's shape"), Progress(job.progress) as shown:
        shown.begin("compiling the sparse model, layers")
        fast = compile_model(model, test[:1], tokens=job.tokens, progress=shown.move)
        shown.begin("compiling the dense model, layers")
        best_dense = compile_model(control, test[:1], tokens=job.tokens, progress=shown.move)
    models = {EAGER: control.eval(), BEST_DENSE: best_dense, OURS: fast}
    latency = {}
    with job.step("[4/5] measuring the three models side by side"), torch.inference_mode():
        for batch in job.settings.batches:
            latency[batch] = measure.compare(
                {name: partial(m, test[:batch]) for name, m in models.items()},
                baseline=(EAGER, BEST_DENSE),
                repeats=200,
                seconds=job.settings.seconds,
                noise=True,
                note="whole model, float32",
                meta={"model": "vision transformer", "data": job.images.name, "batch": batch},
            )
    measure.save(list(latency.values()), job.folder / "records.json")
    return fast, latency


def network(job: Job, seed: int) -> VisionTransformer:
    """The network with the weights that `seed` gives; the global random state is left alone."""
    sizes = job.settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer(
            job.images.side, sizes.patch, sizes.width, sizes.hidden, sizes.layers, sizes.heads, job.images.classes
        )


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """The class of each image, in evaluation mode."""
    with torch.inference_mode():
        return torch.cat([model.eval()(part).argmax(1) for part in images.split(256)])


def accuracy(model: nn.Module, images: Images) -> float:
    """Fraction of the held-out images answered right."""
    return float((predict(model, images.test) == images.test_labels).float().mean())


def accuracies(dense: Run, result: Result) -> Mapping[str, float]:
    """The four figures of the table."""
    assert result.control is not None
    values = {
        "dense": dense.evaluation,
        "control": result.control.evaluation,
        "one-shot": result.sparse.before,
        "sparse": result.sparse.evaluation,
    }
    return {name: value for name, value in values.items() if isinstance(value, float)}


def finish(summary: Summary) -> None:
    """Print the table and write what is found: recipe, plan, summary, the report's page."""
    from rich.console import Console

    folder = summary.folder
    table = summary.table()
    RECIPE.save(folder / "recipe.toml")
    measure.write_json(folder / "plan.json", measure.without_nan(summary.plan.to_dict()))
    measure.write_json(folder / "summary.json", summary.to_dict())
    page = report.write(report.read(folder), folder / "report.html")
    with replacing(folder / "summary.txt") as temporary, open(temporary, "w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table)
        file.write(f"{summary.notes()}\n\n{summary.plan}\n")
    console = Console(highlight=False)
    console.print(table, width=max(console.width, 80))
    console.print(f"{summary.notes()}\n\nThe run's folder: {folder}\nThe report: {page}", markup=False, soft_wrap=True)

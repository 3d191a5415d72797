"""What is killed: each target does its work in a folder, and says what must be true of the folder at any moment."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import twofour
from tests.training.killed_run import digest
from tests.training.small import accuracy, noisy_loader, pair_of_models, recipe
from twofour.checkpoints import INDEX, WEIGHTS
from twofour.errors import FormatError
from twofour.training import checkpoint, finetune

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


class Target:
    """One kind of run.

    A trial is made in a folder of its own, `begin`, is killed in `work`, looked at by `require_whole`, worked again to
    the end, and then compared with `result` of a trial that nothing interrupted.
    """

    name = ""

    def prepare(self, shelf: Path) -> None:
        """Make what all trials share."""
        self.shelf = shelf

    def begin(self, folder: Path) -> None:
        """Make what lies there before the run."""

    def work(self, folder: Path) -> None:
        """Run; in a child process, whose current folder it is."""
        raise NotImplementedError

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        """Put files of a user's into the folder; before the run and again after the kill."""
        return {}

    def require_whole(self, folder: Path) -> str:
        """Return "old" or "new" for what a reader finds in the folder of a killed run; raise where it is neither."""
        raise NotImplementedError

    def result(self, folder: Path) -> object:
        """Return what the run made, without times."""
        raise NotImplementedError

    def belongs(self, folder: Path) -> set[str]:
        """Return the names of all that lies in the folder after a run that ended."""
        return {name.relative_to(folder).as_posix() for name in folder.rglob("*") if not name.is_dir()}


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return twofour.prune(nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))), "2:4")


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    found = twofour.export.read(path)
    return {**found.plain, **{name: packed.unpack() for name, packed in found.packed.items()}}


def which(path: Path, models: dict[str, dict[str, torch.Tensor]]) -> str:
    found = weights_in(path)
    for name, wanted in models.items():
        if found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted):
            return name
    raise AssertionError(f"{path} is neither the old model nor the new one")


class Save(Target):
    """`twofour.save` over a file."""

    name = "save"
    file = "model.safetensors"
    shard_bytes: int | None = None

    def prepare(self, shelf: Path) -> None:
        self.models = {name: model_of(seed) for seed, name in enumerate(("old", "new"))}
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        for name, model in self.models.items():
            twofour.save(model, shelf / f"{name}.safetensors")
            self.weights[name] = weights_in(shelf / f"{name}.safetensors")

    def begin(self, folder: Path) -> None:
        twofour.save(self.models["old"], folder / self.file, max_shard_bytes=self.shard_bytes)

    def work(self, folder: Path) -> None:
        twofour.save(self.models["new"], folder / self.file, max_shard_bytes=self.shard_bytes)

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        return {folder / "notes.txt": b"mine", folder / "other.safetensors": b"another program's"}

    def require_whole(self, folder: Path) -> str:
        return which(folder / self.file, self.weights)

    def result(self, folder: Path) -> object:
        return which(folder / self.file, self.weights)


class Shards(Save):
    """`twofour.save(max_shard_bytes=)` over a folder, after two that hold dense models of a user's and are refused."""

    name, file, shard_bytes = "shards", "", 80_000

    def prepare(self, shelf: Path) -> None:
        super().prepare(shelf)
        save_file({"0.weight": torch.ones(8, 8)}, shelf / "dense", metadata={"format": "pt"})
        index = json.dumps({"weight_map": {"0.weight": "dense.safetensors"}}).encode()
        dense = (shelf / "dense").read_bytes()
        self.dense = {f"one/{WEIGHTS}": dense, f"several/{INDEX}": index, "several/dense.safetensors": dense}

    def work(self, folder: Path) -> None:
        for place in ("one", "several"):
            try:
                twofour.save(self.models["new"], folder / place, max_shard_bytes=self.shard_bytes)
            except FormatError:
                continue
            raise AssertionError(f"{place}: a dense model of another program is saved over")
        super().work(folder)

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        for place in ("one", "several"):
            (folder / place).mkdir(exist_ok=True)
        dense = {folder / name: content for name, content in self.dense.items()}
        return (
            super().plant(folder, killed) | dense | {folder / "model-00001-of-00009.safetensors": b"another program's"}
        )

    def belongs(self, folder: Path) -> set[str]:
        return {INDEX, *json.loads((folder / INDEX).read_text())["weight_map"].values()}


class Prune(Target):
    """`twofour prune FOLDER --out out`, which a killed run goes on with."""

    name = "prune"

    def prepare(self, shelf: Path) -> None:
        from tests.checkpoints.small import random
        from twofour.cli import app  # noqa: F401  transformers too is imported once, before the children are made

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "vocab_size": 128}
        self.source = random(shelf / "llama", "LlamaConfig", "LlamaForCausalLM", "150KB", **sizes)
        (self.source / "vocab.txt").write_text("a b c")

    def work(self, folder: Path) -> None:
        from twofour.cli import app

        out = folder / "out"
        ended = (out / "report.json").exists()  # killed behind its last rename: the command says that it is there
        try:
            app(["prune", str(self.source), "--out", "out"])
        except SystemExit as end:
            assert (end.code or 0) == (2 if ended else 0), end.code

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        found = {folder / "thesis.txt": b"mine"}
        unfinished = folder / "out.unfinished"
        journal = folder / "out.journal.json"
        begun = killed and unfinished.is_dir() and journal.exists()  # else it is refused: not ours
        return found | ({unfinished / "thesis.txt": b"mine"} if begun else {})

    def require_whole(self, folder: Path) -> str:
        out = folder / "out"
        if not out.exists():
            return "old"
        assert twofour.check(out).ok and (out / "report.json").exists()
        return "new"

    def result(self, folder: Path) -> object:
        files = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.name != "thesis.txt"}
        assert len(files) > 5, files.keys()
        return files

    def belongs(self, folder: Path) -> set[str]:
        report = json.loads((folder / "out" / "report.json").read_text())
        return {f"out/{name}" for name in report["files"]}


class Replace(Prune):
    """`twofour prune FOLDER --out out --force` over an earlier result, beside a user's backup of it, out.replaced."""

    name = "replace"

    def prepare(self, shelf: Path) -> None:
        super().prepare(shelf)
        self.earlier = shelf / "earlier"
        with redirect_stdout(StringIO()):
            self.force(self.earlier, "--pattern", "1:4")
        self.old = {path.name: path.read_bytes() for path in self.earlier.iterdir()}

    def begin(self, folder: Path) -> None:
        shutil.copytree(self.earlier, folder / "out")

    def work(self, folder: Path) -> None:
        self.force(Path("out"))

    def force(self, out: Path, *options: str) -> None:
        from twofour.cli import app

        try:
            app(["prune", str(self.source), "--out", str(out), "--force", *options])
        except SystemExit as end:
            assert not end.code, end.code

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        backup = folder / "out.replaced"
        backup.mkdir(exist_ok=True)
        return super().plant(folder, killed) | {backup / name: content for name, content in self.old.items()}

    def require_whole(self, folder: Path) -> str:
        if not (folder / "out").exists():  # between the two renames: the next run brings it back
            (out,) = folder.glob(".out.twofour-*.old/earlier")
        else:
            out = folder / "out"
        if {path.name: path.read_bytes() for path in out.iterdir()} == self.old:
            return "old"
        assert out == folder / "out", "what was moved aside is not the earlier result"
        return super().require_whole(folder)


class Finetune(Target):
    """`finetune(checkpoint=)` with a control, which a killed run goes on with."""

    name = "finetune"

    def begin(self, folder: Path) -> None:
        (self.shelf / "digest").unlink(missing_ok=True)

    def work(self, folder: Path) -> None:
        model, control = pair_of_models()
        result = finetune(
            model,
            noisy_loader(own_generator=True),
            **recipe(),
            evaluate=accuracy,
            control=control,
            checkpoint=folder / "run",
            checkpoint_every=2,
        )
        (self.shelf / "digest").write_text(digest(result.to_dict(), model, control))

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        (folder / "run").mkdir(exist_ok=True)
        return {folder / "run" / "notes.txt": b"mine", folder / "run" / "best.pt": b"mine too"}

    def require_whole(self, folder: Path) -> str:
        found = [checkpoint.read(folder / "run" / name) for name in ("sparse.pt", "control.pt")]
        return "new" if found[1] is not None else "old"

    def result(self, folder: Path) -> object:
        return (self.shelf / "digest").read_text()

    def belongs(self, folder: Path) -> set[str]:
        return {"run/sparse.pt", "run/control.pt"}


class Experiments(Target):
    """A recorded task of experiments/run.py: a dense model trained and kept, rows added one by one."""

    name = "experiments"

    def prepare(self, shelf: Path) -> None:
        sys.path.insert(0, str(EXPERIMENTS))
        import run  # noqa: F401  once, before the children are made
        from tests.experiments.toys import toy

        self.toy = toy

    def work(self, folder: Path) -> None:
        import records
        import run

        run.SCRATCH = records.SCRATCH = folder / "runs"
        records.TRACKED = folder / "records"
        run.TASKS["toy"] = self.toy
        run.task("toy", "0", "all", "2:4 magnitude", threads=1, device="cpu", fresh=False, record=True)

    def plant(self, folder: Path, killed: bool) -> dict[Path, bytes]:
        for name in ("runs", "records"):
            (folder / name).mkdir(exist_ok=True)
        return {folder / "runs" / "notes.txt": b"mine", folder / "records" / "mine.json": b"{}"}

    def require_whole(self, folder: Path) -> str:
        if not (folder / "records" / "toy.json").exists():
            return "old"
        assert self.result(folder)
        return "new"

    def result(self, folder: Path) -> object:
        rows = json.loads((folder / "records" / "toy.json").read_text())["rows"]
        return [
            {key: value for key, value in row.items() if key not in ("seconds", "commit", "pruning", "memory")}
            for row in rows
        ]

    def belongs(self, folder: Path) -> set[str]:
        dense = {f"runs/{path.name}" for path in (folder / "runs").glob("toy-dense-*.safetensors")}
        return {"records/toy.json", *dense}


TARGETS = {target.name: target for target in (Prune, Replace, Save, Shards, Finetune, Experiments)}


def single_threaded() -> None:
    """OpenMP's threads do not survive a fork, and one thread gives the same bits every time."""
    torch.set_num_threads(1)
    os.environ["TWOFOUR_CACHE"] = "off"

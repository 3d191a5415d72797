"""`import twofour` must be cheap: no optional package, no native build, no CUDA initialisation."""

import subprocess
import sys
from pathlib import Path

import twofour

FOR_TESTS = ("jaxtyping", "beartype")
DYNAMO = ("torch._dynamo", "sympy", "twofour.training")
"""What is imported where something is captured, compiled or trained: half of the time that a command took to start."""
HEAVY = ("triton", "transformers", "sklearn", "rich", "typer", "safetensors", "twofour.native", "twofour.kernels")


def test_import_brings_nothing_heavy() -> None:
    """One process, each stage of it with less imported than the next; `import twofour` gives `twofour.export`."""
    code = f"""
import sys
import twofour
bare = set(vars(twofour))
heavy = [name for name in {HEAVY + FOR_TESTS} if name in sys.modules]
assert not heavy, heavy
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()

from typer.testing import CliRunner
from twofour.cli import app
assert CliRunner().invoke(app, ["--version"]).exit_code == 0
assert CliRunner().invoke(app, ["kernels", "--help"]).exit_code == 0
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
others = [name for name in ("compiler", "hardware", "training", "optimizing") if f"twofour.{{name}}" in sys.modules]
assert not others, others

from twofour.cli import advise, bench, check, explain, export, importing, optimize, prune, report, shrink
twofour.prune, twofour.check, twofour.compile, twofour.save
slow = [name for name in {DYNAMO} if name in sys.modules]
assert not slow, slow
assert "transformers" not in sys.modules and "sklearn" not in sys.modules
assert "compile" in dir(twofour)
try:
    twofour.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("an unknown name was found")

def is_found(name):  # asked of the function itself: what was imported by now is an attribute whatever it says
    try:
        return name in bare or twofour.__getattr__(name) is sys.modules[f"twofour.{{name}}"]
    except AttributeError:
        return False

stages = [name for name in sys.argv[1:] if not is_found(name)]
assert not stages, stages
assert twofour.export.to_onnx and twofour.compat.asp and twofour.checker.check_weights
assert not hasattr(twofour, "legal") and not hasattr(twofour, "__nothing__")
"""
    source = Path(twofour.__file__).parent
    stages = [
        entry.stem for entry in source.iterdir() if not entry.name.startswith("_") and entry.suffix in ("", ".py")
    ]
    assert {"export", "checker", "compat", "errors"} <= set(stages)
    subprocess.run([sys.executable, "-c", code, *stages], check=True, timeout=120)


def test_a_help_page_waits_for_no_torch() -> None:
    """`twofour --help` took four seconds; of a wrong word too nothing but this package's names is needed."""
    code = f"""
import sys
from typer.testing import CliRunner
from twofour.cli import app
from twofour.cli.app import COMMANDS
run = lambda *words: CliRunner().invoke(app, words)
assert run("--version").exit_code == 0
listed = run("--help").output
assert all(name in listed for name in COMMANDS), listed
assert "'check'" in run("chekc").output
heavy = [name for name in ("torch", *{HEAVY + DYNAMO}) if name in sys.modules and name not in ("rich", "typer")]
assert not heavy, heavy
run("kernels")
assert "torch" in sys.modules
heavy = [name for name in {DYNAMO} if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_one_openmp_runtime_in_the_process() -> None:
    """It is the one that torch loaded, after a product by several threads as before the import."""
    code = """
import torch
runtimes = lambda: {
    line.split()[-1]
    for line in open("/proc/self/maps")
    if line.rsplit("/", 1)[-1].startswith(("libgomp", "libomp", "libiomp"))
}
torch.set_num_threads(2)
alone = runtimes()
assert len(alone) == 1, alone
import twofour
from twofour import kernels, native, packing, patterns
weight = torch.randn(64, 64)
weight *= patterns.parse("2:4").project(weight)
for source in native.thread_sources():
    assert native.extension().use_threads(source, torch._C.__file__), source
    x = torch.randn(32, 64)
    torch.testing.assert_close(kernels.matmul(x, packing.pack(weight, "2:4")), x @ weight.T)
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    assert runtimes() == alone, runtimes() - alone
"""
    if sys.platform == "linux":
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_extension_loads_without_torch() -> None:
    """It is linked with neither torch nor an OpenMP runtime, and has threads of its own until it finds theirs."""
    code = """
import importlib.util, sys
from importlib.metadata import files
found = [f.locate() for f in files("twofour") if f.name.startswith("_ext")]
assert found and "torch" not in sys.modules
spec = importlib.util.spec_from_file_location("_ext", found[0])
extension = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
assert extension.threads_backend() == "own"
if sys.platform == "linux":
    assert not any(name in open("/proc/self/maps").read() for name in ("libgomp", "libomp", "libiomp", "libtorch"))
assert not extension.use_threads("openmp", "") and not extension.use_threads("nothing", "")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

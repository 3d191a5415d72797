"""`import twofour` must be cheap: no optional package, no native build, no CUDA initialisation."""

import subprocess
import sys
from pathlib import Path

import twofour

HEAVY = ("triton", "transformers", "sklearn", "rich", "typer", "safetensors", "twofour.native", "twofour.kernels")


def test_import_brings_nothing_heavy() -> None:
    code = f"""
import sys
import twofour
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
twofour.prune, twofour.check, twofour.compile
assert "transformers" not in sys.modules and "sklearn" not in sys.modules
assert "compile" in dir(twofour)
try:
    twofour.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("an unknown name was found")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_stage_is_an_attribute() -> None:
    """`import twofour` alone is enough to write `twofour.export.to_onnx`."""
    code = """
import sys
import twofour
stages = [name for name in sys.argv[1:] if not hasattr(twofour, name)]
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


def test_one_openmp_runtime_in_the_process() -> None:
    code = """
import torch
from twofour import native
native.extension()
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
maps = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
assert len(maps) == 1, maps
"""
    if sys.platform == "linux":
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_extension_brings_no_openmp_runtime_of_its_own() -> None:
    """Without torch it does not load for want of one, unless it was built to run on one thread."""
    code = """
import importlib.util, sys
from importlib.metadata import files
found = [f.locate() for f in files("twofour") if f.name.startswith("_ext")]
assert found and "torch" not in sys.modules
spec = importlib.util.spec_from_file_location("_ext", found[0])
try:
    extension = importlib.util.module_from_spec(spec)
except ImportError as error:
    assert "omp" in str(error).lower(), error
else:
    spec.loader.exec_module(extension)
    assert extension.threads_backend() == "single", "it loaded an OpenMP runtime by itself"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""What the compiled parts ask of a system: its libraries, and no version of them newer than a wheel may count on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twofour import native
from twofour.export import runtime

# The newest symbols of manylinux_2_28 (AlmaLinux 8), as auditwheel's policy lists them.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libpthread.so.0"}


FILES = {
    "extension": lambda: Path(str(native.extension().__file__)),
    "libtwofour": lambda: runtime.library(),
}


def listing(part: str) -> tuple[Path, str]:
    if sys.platform != "linux" or shutil.which("objdump") is None:
        pytest.skip("needs Linux and `objdump`, which comes with every compiler there")
    file = FILES[part]()
    return file, subprocess.run(["objdump", "-p", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("part", FILES)
def test_it_needs_the_system_alone(part: str) -> None:
    _, text = listing(part)
    needed = set(re.findall(r"^\s+NEEDED\s+(\S+)", text, re.M))
    assert "libc.so.6" in needed
    sanitizers = {name for name in needed if re.match(r"lib[atu]b?san", name)}
    assert {name for name in needed - SYSTEM - sanitizers if not name.startswith("ld-linux")} == set()


@pytest.mark.parametrize("part", FILES)
def test_it_runs_on_systems_as_old_as_the_wheel_promises(part: str) -> None:
    file, text = listing(part)
    versions = re.findall(r"0x\w+ 0x\w+ \d+ ([A-Z]+)_([\d.]+)$", text, re.M)
    assert "GLIBC" in {kind for kind, _ in versions}
    # An extension built by hand has nanobind's runtime inside, whose pointers to exceptions are CXXABI_1.3.13.
    exempt = set() if ".abi3." in file.name or part == "libtwofour" else {"CXXABI"}
    newer = [
        f"{kind}_{number}"
        for kind, number in versions
        if kind not in exempt and tuple(map(int, number.split("."))) > NEWEST[kind]
    ]
    assert newer == [], "native/loaded.cc, libstdcxx.cc and runtime/old_glibc.cc say how older versions are asked for"

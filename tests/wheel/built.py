"""`make wheel`: what a wheel and a source distribution have to hold, and what the compiled part may ask of a system.

    python tests/wheel/built.py dist

It needs requirements/wheel.txt and prints one line a fact. `make wheel` runs the tools of others beside it: auditwheel,
abi3audit, check-wheel-contents, twine.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from elftools.elf.elffile import ELFFile
from kernel_abi_check import ObjectFile
from packaging.utils import parse_wheel_filename

LARGEST = 12_000_000
"""Bytes of a wheel."""
OLDEST = (2, 28)
"""The newest glibc that a wheel may ask for."""
PYTHON = "3.11"
"""The Python whose stable ABI it may ask for."""
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libpthread.so.0"}
"""Libraries that every glibc system with torch has; the loader, whose name has the processor in it, comes to these."""
HEADER = "twofour/native/include/twofour.h"
"""Of libtwofour, for programs in C."""
PAGE = {"twofour/report/page.css", "twofour/report/page.js"}
"""What `twofour report` puts into its page."""
SOURCES = (".cc", ".h", ".inc", ".def", ".md", ".o", ".a")


def check_wheel(path: Path) -> None:
    """Look at one wheel: its name, size, metadata, files, and the extension in it."""
    _, _, _, tags = parse_wheel_filename(path.name)
    assert {tag.interpreter for tag in tags} == {"cp311"} and {tag.abi for tag in tags} == {"abi3"}, path.name
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e6:.1f} MB, at most {LARGEST / 1e6:.0f}")
    assert size <= LARGEST, f"{path.name} is too large"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        stray = [name for name in names if name.endswith(SOURCES) and name != HEADER]
        assert not stray, f"sources in the wheel: {stray[:5]}"
        assert "twofour/py.typed" in names
        outside = {name.split("/")[0] for name in names} - {"twofour"}
        assert all(name.endswith(".dist-info") for name in outside), f"beside the package: {outside}"
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(wheel.read(metadata).decode())
        check_page(said.get_all("Project-URL") or [], str(said.get_payload()))
        needs = said.get_all("Requires-Dist") or []
        assert any(need.startswith("nanobind-backend") and "<" not in need for need in needs), needs
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        binaries = {name for name in names if re.search(r"\.(so(\.\d+)?|pyd|dylib|dll)$", name)}
        extension = {name for name in binaries if re.fullmatch(r"twofour/native/_ext\.(abi3\.so|pyd)", name)}
        library = {name for name in binaries if re.match(r"twofour/native/(lib)?twofour\.", name)}
        windows = any(name.endswith(".pyd") for name in extension)  # libtwofour is for systems with POSIX threads
        assert len(extension) == 1 and len(library) == (not windows) and binaries == extension | library, binaries
        assert (HEADER in names) == (not windows)
        assert set(names) >= PAGE, PAGE - set(names)
        contents = {name: wheel.read(name) for name in sorted(binaries)}
    elves = {name: content for name, content in contents.items() if content[:4] == b"\x7fELF"}
    for name, content in elves.items():
        print(name)
        check_elf(content)
        check_symbols(content)
    if elves:
        policies = [re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", tag.platform) for tag in tags]
        glibcs = [(int(found[1]), int(found[2])) for found in policies if found]
        assert glibcs and min(glibcs) <= OLDEST, f"{path.name} promises no glibc of {OLDEST} or older"


def check_page(addresses: list[str], page: str) -> None:
    """Look at README, the page on PyPI: nothing there is beside it, so that links need the address (RELEASE.md)."""
    relative = re.findall(r"\]\((?!https?:|#)([^)]+)\)", page)
    assert not addresses or not relative, f"links that lead nowhere on PyPI: {relative[:3]}; RELEASE.md mends them"
    print(f"the page on PyPI: {len(relative)} relative links" + (", as there is no address yet" if relative else ""))


def check_elf(content: bytes) -> None:
    """Look at the extension or libtwofour: stripped, and nothing needed that is not the system's."""
    elf = ELFFile(io.BytesIO(content))
    assert elf.get_section_by_name(".symtab") is None and elf.get_section_by_name(".debug_info") is None, "not stripped"
    dynamic = elf.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert not {tag.entry.d_tag for tag in dynamic.iter_tags()} & {"DT_RPATH", "DT_RUNPATH"}, "a search path"
    strange = {name for name in needed - SYSTEM if not name.startswith("ld-linux")}
    assert not strange, f"it needs {strange}"
    newest: dict[str, tuple[int, ...]] = {}
    for _, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for version in versions:
            kind, _, number = version.name.partition("_")
            found = tuple(map(int, number.split(".")))
            newest[kind] = max(newest.get(kind, (0,)), found)
    print("  needs", *sorted(needed))
    print("  and of them at most", *(f"{kind}_{'.'.join(map(str, number))}" for kind, number in sorted(newest.items())))


def check_symbols(content: bytes) -> None:
    """Look at each symbol: none beyond the policy of manylinux, none of Python beyond its stable ABI."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        extension = ObjectFile(file.name)
        policy = f"manylinux_{OLDEST[0]}_{OLDEST[1]}"
        found = [*extension.check_manylinux(policy), *extension.check_python_abi(PYTHON)]
    assert not found, f"symbols beyond {policy} or Python {PYTHON}: {found}"
    print(f"  symbols within {policy} and the stable ABI of Python {PYTHON} (kernel-abi-check)")


def check_sdist(path: Path) -> None:
    """Look at the source distribution: what the build reads is there, records and workflows are not."""
    with tarfile.open(path) as sources:
        names = [name.partition("/")[2] for name in sources.getnames()]
    needed = {"CMakeLists.txt", "pyproject.toml", "LICENSE", "include/twofour.h", "tests/test_tiny.py"}
    needed |= {"src/twofour/native/isa.def", "src/twofour/native/runtime/libtwofour.map"}
    for name in sorted(needed | {f"src/{name}" for name in PAGE}):
        assert name in names, f"{name} is not in {path.name}"
    strange = [name for name in names if re.match(r"(\.|build/|dist/|benchmarks/|experiments/)|.*\.so$", name)]
    assert not strange, f"in {path.name}: {strange[:5]}"
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} names")


def main(folder: Path) -> None:
    """Look at every wheel and the one source distribution of a folder."""
    wheels = sorted(folder.glob("*.whl"))
    (sdist,) = folder.glob("*.tar.gz")
    assert wheels, f"no wheel in {folder}"
    for wheel in wheels:
        check_wheel(wheel)
    check_sdist(sdist)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

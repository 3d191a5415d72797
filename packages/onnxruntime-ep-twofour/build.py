"""Makes the wheel onnxruntime-ep-twofour of a wheel of twofour: its library, its tag of the system, any Python.

    python packages/onnxruntime-ep-twofour/build.py dist dist/onnxruntime

It reads the newest wheel twofour-*.whl of the first folder and writes its own into the second.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "onnxruntime_ep_twofour"
SUMMARY = "ONNX files with 2:4 zeros on fast kernels: an execution provider for ONNX Runtime"


def main(folder: Path, out: Path) -> Path:
    """Write the wheel and return its path."""
    wheels = sorted(folder.glob("twofour-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise SystemExit(f"{folder} has no wheel of twofour: make wheel")
    with zipfile.ZipFile(wheels[-1]) as whole:
        names = whole.namelist()
        (metadata,) = (
            Parser().parsestr(whole.read(name).decode()) for name in names if name.endswith(".dist-info/METADATA")
        )
        found = [name for name in names if re.fullmatch(r"twofour/native/libtwofour\.(so\.1|1\.dylib)", name)]
        if len(found) != 1:
            raise SystemExit(f"{wheels[-1].name} has no libtwofour: there is none for this system")
        (licence,) = (whole.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        library = whole.read(found[0])
    version, platform = metadata["Version"], wheels[-1].stem.split("-", 4)[4]
    info = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": (HERE / PACKAGE / "__init__.py").read_bytes(),
        f"{PACKAGE}/{Path(found[0]).name}": library,
        f"{info}/licenses/LICENSE": licence,
        f"{info}/METADATA": _metadata(version, metadata["Requires-Python"]),
        f"{info}/WHEEL": _wheel(platform),
    }
    out.mkdir(parents=True, exist_ok=True)
    made = out / f"{PACKAGE}-{version}-py3-none-{platform}.whl"
    _write(made, files, f"{info}/RECORD")
    print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")
    return made


def _metadata(version: str, python: str) -> bytes:
    fields = {
        "Metadata-Version": "2.4",
        "Name": "onnxruntime-ep-twofour",
        "Version": version,
        "Summary": SUMMARY,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": python,
        "Description-Content-Type": "text/markdown",
    }
    head = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return (head + "\n" + (HERE / "README.md").read_text()).encode()


def _wheel(platform: str) -> bytes:
    tags = "".join(f"Tag: py3-none-{one}\n" for one in platform.split("."))
    return f"Wheel-Version: 1.0\nGenerator: twofour\nRoot-Is-Purelib: false\n{tags}".encode()


def _write(path: Path, files: dict[str, bytes], record: str) -> None:
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(content)}\n")
            _add(wheel, name, content)
        _add(wheel, record, "".join([*rows, f"{record},,\n"]).encode())


def _add(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bytes whenever it is made
    entry.compress_type, entry.external_attr = (
        zipfile.ZIP_DEFLATED,
        (0o100755 if "libtwofour" in name else 0o100644) << 16,
    )
    wheel.writestr(entry, content)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

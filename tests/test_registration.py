"""What registers itself once another package is imported: imported then, not sooner, and never in its way."""

import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, folder: Path) -> str:
    """Run code in a Python of its own that finds modules in the folder, and return what it printed."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "theirs.py").write_text("import sys\nprint('theirs', 'ours' in sys.modules)\nmethods = {}\n")
    (tmp_path / "ours.py").write_text("import theirs\nprint('ours')\ntheirs.methods['twofour'] = 24\n")
    return tmp_path


def test_ours_follows_theirs(modules: Path) -> None:
    code = """
from twofour.registration import once_imported
before = list(sys.meta_path)
once_imported("theirs", "ours")
assert "ours" not in sys.modules and "theirs" not in sys.modules
import theirs
assert theirs.methods == {"twofour": 24} and sys.meta_path == before
"""
    assert python(code, modules).split() == ["theirs", "False", "ours"]


def test_at_once_where_theirs_is_there(modules: Path) -> None:
    code = """
import theirs
from twofour.registration import once_imported
once_imported("theirs", "ours")
assert theirs.methods == {"twofour": 24}
"""
    assert python(code, modules).split() == ["theirs", "False", "ours"]


def test_ours_imported_first_is_imported_once(modules: Path) -> None:
    code = """
from twofour.registration import once_imported
once_imported("theirs", "ours")
import ours, theirs
assert theirs.methods == {"twofour": 24}
"""
    assert python(code, modules).split() == ["theirs", "True", "ours"]


def test_a_failure_of_ours_leaves_theirs(modules: Path) -> None:
    (modules / "ours.py").write_text("raise RuntimeError('too old')\n")
    code = """
import logging
logging.basicConfig(stream=sys.stdout)
from twofour.registration import once_imported
once_imported("theirs", "ours")
import theirs
"""
    assert "ours could not be registered: RuntimeError: too old" in python(code, modules)


def test_what_is_not_installed_is_not_found(tmp_path: Path) -> None:
    code = """
from twofour.registration import once_imported
once_imported("not_there", "ours")
try:
    import not_there
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert python(code, tmp_path).split() == ["not_there"]


def test_transformers_knows_twofour_once_both_are_imported() -> None:
    """`import twofour` is enough for folders whose config.json names twofour, and imports no transformers itself."""
    pytest.importorskip("transformers")
    code = """
import twofour
assert "transformers" not in sys.modules
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known
print("twofour" in known)
"""
    assert python(code, Path.cwd()).split() == ["True"]

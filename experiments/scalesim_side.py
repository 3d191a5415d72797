"""Run SCALE-Sim on cases; the only file here that imports it, for an environment of its own.

python -m venv /tmp/scalesim && /tmp/scalesim/bin/pip install scalesim==3.0.0 "numpy==2.2.*"
/tmp/scalesim/bin/python experiments/scalesim_side.py < cases.json > results.json

A case is {"name", "config", "topology", "gemm"}: the texts of a .cfg and of a topology .csv. A result is its reports by
file name and the processor seconds of each layer (`single_layer_sim.run`: no traces saved), or the error.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from scalesim import single_layer_sim
from scalesim.scale_sim import scalesim

REPORTS = ("COMPUTE_REPORT.csv", "BANDWIDTH_REPORT.csv", "DETAILED_ACCESS_REPORT.csv", "SPARSE_REPORT.csv")
seconds: list[float] = []
untimed = single_layer_sim.single_layer_sim.run


def timed(layer: single_layer_sim.single_layer_sim) -> None:
    """Run a layer and note how long it took."""
    start = time.thread_time()
    untimed(layer)
    seconds.append(time.thread_time() - start)


def run(case: dict[str, object]) -> dict[str, object]:
    """Run one case in a folder of its own."""
    seconds.clear()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        place = Path(folder)
        for name in ("config", "topology"):
            (place / name).write_text(str(case[name]))
        (place / "layout").write_text("Layer,\n")  # read even when layouts are off
        try:
            simulator = scalesim(
                save_disk_space=True,
                verbose=False,
                config=str(place / "config"),
                topology=str(place / "topology"),
                layout=str(place / "layout"),
                input_type_gemm=bool(case["gemm"]),
            )
            simulator.run_scale(top_path=str(place / "out"))
        except Exception as error:  # SCALE-Sim's own crashes are results
            return {"name": case["name"], "error": f"{type(error).__name__}: {error}"}
        found = {path.name: path.read_text() for path in place.glob("out/*/*.csv")}
    return {
        "name": case["name"],
        "reports": {name: found[name] for name in REPORTS if name in found},
        "seconds": list(seconds),
    }


def main() -> None:
    """Read cases, write results."""
    single_layer_sim.single_layer_sim.run = timed
    versions = {name: version(name) for name in ("scalesim", "numpy")} | {"python": sys.version.split()[0]}
    results = [run(case) for case in json.load(sys.stdin)]
    json.dump({"versions": versions, "results": results}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

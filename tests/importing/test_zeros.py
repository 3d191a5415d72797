"""Plain weights with zeros: the pattern is found, never guessed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import twofour
from tests.importing.small import Net, net_state, sparse
from twofour import importing
from twofour.errors import FormatError

SPARSE = {"conv.weight": "2:4", "fc1.weight": "2:4", "fc2.weight": "2:4"}


def written(tmp_path: Path, state: dict[str, Tensor], promise: str | None = None) -> Path:
    metadata = {"twofour.patterns": promise} if promise else None
    save_file(state, tmp_path / "m.safetensors", metadata)
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("pickled", [False, True])
def test_sparse_weights_are_found(tmp_path: Path, pickled: bool) -> None:
    state = net_state()
    path = written(tmp_path, state)
    if pickled:
        path = tmp_path / "m.pth"
        torch.save({"epoch": 3, "state_dict": state}, path)
    assert importing.decode(path).patterns == SPARSE
    model = twofour.read(path, Net())
    assert twofour.check(model).ok
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_strictest_pattern_is_taken_and_dense_weights_stay_plain(tmp_path: Path) -> None:
    state = {
        "a.weight": sparse(16, 32, pattern=(1, 4)),
        "b.weight": sparse(16, 32, pattern=(4, 8)),
        "c.weight": torch.randn(16, 32),
        "d.weight": torch.zeros(16, 32),
        "e.bias": torch.zeros(16),
    }
    found = importing.decode(written(tmp_path, state))
    assert found.patterns == {"a.weight": "2:4", "b.weight": "4:8"}


def test_a_model_tells_the_axis_that_a_file_does_not(tmp_path: Path) -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.fc = nn.ConvTranspose1d(32, 16, 3), nn.Linear(16, 32)

    weight = sparse(16 * 3, 32).view(16, 3, 32).permute(2, 0, 1).contiguous()
    state = {**Conv1D().state_dict(), "up.weight": weight, "fc.weight": sparse(32, 16)}
    path = written(tmp_path, state)
    assert importing.decode(path).patterns == {"fc.weight": "2:4"}
    model = twofour.read(path, Conv1D())
    assert {found.name for found in twofour.check(model).layers if found.kept} == {"up.weight", "fc.weight"}


def test_zeros_along_the_other_axis_are_named(tmp_path: Path) -> None:
    state = {"fc.weight": sparse(32, 64), "c.weight": sparse(64, 32).t().contiguous()}
    found = importing.decode(written(tmp_path, state))
    assert set(found.sparse) == {"fc.weight"} and "axis 0" in found.notes[0]


def test_nothing_sparse_is_an_error_that_names_what_nearly_is(tmp_path: Path) -> None:
    weight = sparse(32, 64)
    weight[3, 4:8] = 1
    with pytest.raises(FormatError, match=r"no sparse weight(.|\n)*`fc.weight` as 2:4: 1 of 512 groups break it"):
        importing.decode(written(tmp_path, {"fc.weight": weight}))


def test_a_promise_in_the_metadata_is_held(tmp_path: Path) -> None:
    weight = sparse(32, 64)
    assert importing.decode(written(tmp_path, {"fc.weight": weight}, '{"fc.weight": "2:4"}')).patterns
    weight[3, 4:8] = 1
    with pytest.raises(FormatError, match=r"1 of 512 groups break it(.|\n)*keeps the 2:4"):
        importing.decode(written(tmp_path, {"fc.weight": weight}, '{"fc.weight": "2:4"}'))
    with pytest.raises(FormatError, match="not there"):
        importing.decode(written(tmp_path, {"fc.weight": weight}, '{"other": "2:4"}'))


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    weight = sparse(32, 64)
    weight[weight != 0] = float("nan")
    with pytest.raises(FormatError, match="NaN"):
        importing.decode(written(tmp_path, {"fc.weight": weight}))


def test_float8_is_left_plain(tmp_path: Path) -> None:
    state = {"a.weight": sparse(16, 32), "b.weight": sparse(16, 32).to(torch.float8_e4m3fn)}
    found = importing.decode(written(tmp_path, state))
    assert set(found.sparse) == {"a.weight"} and found.plain["b.weight"].dtype == torch.float8_e4m3fn

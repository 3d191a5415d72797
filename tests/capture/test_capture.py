"""Capturing a model: any batch and length where torch can, the example's sizes where not, else a clear refusal."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import config as fx_config

from twofour.capture import KEPT, Guard, arguments, capture, changes_in_place, forward
from twofour.errors import CompileError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.second(torch.relu(self.first(x))) * scale
        return {"y": y if mask is None else y * mask}


def test_arguments_are_named_however_they_are_given() -> None:
    x = torch.randn(2, 3, 8)
    by_position, by_name = arguments(Block(), (x, 2.0), {}), arguments(Block(), (), {"scale": 2.0, "x": x})
    assert list(by_position) == list(by_name) == ["x", "scale"]
    assert list(arguments(Block(), (x,), {"mask": None})) == ["x"], "what is None by default counts as not given"


@pytest.mark.parametrize("batch", [1, 2])
def test_a_graph_serves_other_sizes(batch: int) -> None:
    graph = capture(Block(), {"x": torch.randn(batch, 3, 8)})
    assert graph.dynamic and not graph.reason
    guard = Guard(graph)
    assert guard.leaves({"x": torch.randn(5, 7, 8)}) is not None
    assert guard.leaves({"x": torch.randn(1, 1, 8)}) is not None
    for unfit in (torch.randn(5, 7, 9), torch.randn(5, 8), torch.randn(5, 7, 8).double(), torch.randn(0, 7, 8)):
        assert guard.leaves({"x": unfit}) is None
    assert guard.leaves({"x": torch.randn(5, 7, 8), "scale": 2.0}) is None, "another structure"


def test_constants_are_part_of_the_guard() -> None:
    guard = Guard(capture(Block(), {"x": torch.randn(2, 3, 8), "scale": 2.0}))
    assert guard.leaves({"x": torch.randn(2, 3, 8), "scale": 2.0}) is not None
    assert guard.leaves({"x": torch.randn(2, 3, 8), "scale": 3.0}) is None


def test_conditions_on_sizes_are_kept() -> None:
    class Even(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 4) if x.shape[0] % 4 == 0 else x

    guard = Guard(capture(Even(), {"x": torch.randn(8, 3)}))
    assert guard.leaves({"x": torch.randn(12, 3)}) is not None
    assert guard.leaves({"x": torch.randn(10, 3)}) is None


def test_named_layers_stay_whole() -> None:
    model = Block()
    graph = capture(model, {"x": torch.randn(2, 3, 8)}, {"first": (16,)})
    nodes = [node for node in graph.module.graph.nodes if node.target is KEPT]
    assert [node.args[1:] for node in nodes] == [("first", 16, [])]
    assert "forward" not in model.first.__dict__, "the model is left as it was"
    assert not any("first" in name for name, _ in graph.module.named_buffers())


def test_changes_in_place_become_new_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    graph = capture(model, {"input": torch.randn(2, 8)})
    assert not any(str(node.target).endswith("relu_.default") for node in graph.module.graph.nodes)


class Chain(nn.Module):
    """Changes in place of what is new, which is read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        before = y.exp()
        z = y.add_(before)
        z.relu_().mul_(2)
        return before + y + z.masked_fill_(z > 3, 1.0) + nn.functional.hardtanh_(self.conv(y), -0.5, 0.5)


class Views(nn.Module):
    """Changes in place that a view, an alias, an input or another type shows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if self.how == "a view before":
            rows = y.flatten()
            y.relu_()
            return rows * 2
        if self.how == "into a view":
            y[:, 0].zero_()
            return y
        if self.how == "an alias":
            z = y.contiguous()
            z.mul_(3)
            return y + z
        if self.how == "several answers":
            one, other = y.split(2, 1)
            one.mul_(3)
            return y.sum() + one + other
        z = (y > 0).long()
        z.add_(2)
        return z + y


def test_changes_in_place_of_new_tensors_need_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took as long again as the first."""
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    model, x = Chain().eval(), torch.randn(2, 4, 6, 6)
    model.norm.running_mean.normal_()
    with torch.no_grad():
        graph, want = capture(model, {"x": x}), model(x.clone())
        torch.testing.assert_close(graph.module(x)[0], want)
    names = [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]
    assert not any(changes_in_place(node) for node in graph.module.graph.nodes) and "aten.relu.default" in names


@pytest.mark.parametrize("how", ["a view before", "into a view", "an alias", "several answers", "whole numbers"])
def test_changes_in_place_that_others_see_are_seen(how: str) -> None:
    model, x = Views(how), torch.randn(3, 4)
    graph = capture(model, {"x": x})
    assert not any(changes_in_place(node) for node in graph.module.graph.nodes)
    torch.testing.assert_close(graph.module(x)[0], model(x))


class Compared(nn.Module):
    """Comparisons in place, which answer with floats there and with booleans elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if self.how == "gt_":
            m = y.gt_(0)
            return m.add_(m) + m
        if self.how == "ge_":
            return y.ge_(0).sub_(0.5)
        if self.how == "eq_":
            return y.eq_(x + 1).neg_()
        return y.logical_not_()


@pytest.mark.parametrize("how", ["gt_", "ge_", "eq_", "logical_not_"])
def test_comparisons_in_place_answer_with_floats(how: str) -> None:
    model, x = Compared(how), torch.randn(3, 4)
    (found,), want = capture(model, {"x": x}).module(x), model(x)
    assert found.dtype == want.dtype == torch.float32 and torch.equal(found, want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("how", ["after", "before", "answered", "a view"])
def test_changes_in_place_beside_dropout_are_seen(how: str, inplace: bool) -> None:
    """In evaluation mode it answers with the tensor that it is given."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=inplace)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            rows = y.flatten() if how == "a view" else y
            z = self.drop(y)
            (y if how in ("before", "answered") else z).mul_(3)
            return z if how == "answered" else (rows.view(y.shape) + z)

    model, x = Dropped().eval(), torch.randn(3, 4)
    torch.testing.assert_close(capture(model, {"x": x}).module(x)[0], model(x))


def test_a_model_that_branches_on_values_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CompileError, match="the model cannot be captured as a graph") as caught:
        capture(Branching(), {"x": torch.randn(2, 3)})
    assert len(caught.value.reasons) == 3 and "graph=False" in str(caught.value)
    assert all("follows from the values of a tensor" in reason for reason in caught.value.reasons)


class Knows:
    """A class that torch's captures do not know."""


class Answers(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Knows]:
        return x + 1, Knows()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


@pytest.mark.parametrize(
    ("model", "why"), [(Answers(), "not a known type"), (Counts(), "changes the model or its input")]
)
def test_what_other_sizes_do_not_mend_is_tried_once(
    model: nn.Module, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt traces the whole model: of one image or sentence five were made."""
    attempts, export = [], torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **named: attempts.append(1) or export(*args, **named))
    with pytest.raises(CompileError, match="the model cannot be captured as a graph") as caught:
        capture(model, {"x": torch.randn(1, 3)})
    assert len(caught.value.reasons) == len(attempts) == 1 and why in caught.value.reasons[0]


def test_nodes_carry_no_lines_of_python() -> None:
    """Nobody reads them, and looking them up took a third of a capture."""
    before = fx_config.do_not_emit_stack_traces
    graph = capture(Block(), {"x": torch.randn(2, 3, 8)})
    assert not any(node.stack_trace for node in graph.module.graph.nodes)
    assert fx_config.do_not_emit_stack_traces is before


def test_a_failing_attempt_leaves_torchs_traces_out_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten() @ x if x.sum() > 0 else x

    with pytest.raises(CompileError, match="cannot be captured"):
        capture(Branching(), {"x": torch.randn(2, 3)})
    assert not capfd.readouterr().err


@pytest.mark.parametrize("answer", [lambda x: x[x[:, 0] > 0], lambda x: torch.nonzero(x), lambda x: x[0, 0].item() + x])
def test_a_size_that_follows_from_values_is_refused(answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Chooses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return answer(x)

    try:
        graph = capture(Chooses(), {"x": torch.randn(4, 3)})
    except CompileError as error:
        assert "follows from the values of a tensor" in str(error) or "branch" in str(error)
    else:
        x = torch.randn(7, 3)
        torch.testing.assert_close(graph.module(x)[0], answer(x))


def test_this_torch_has_the_conditions_on_sizes() -> None:
    program = torch.export.export(Block(), (torch.randn(2, 3, 8),), strict=False)
    assert hasattr(program, "_guards_code"), "without it every graph is for the example's sizes alone"


def test_conditions_are_written_in_pythons_own_functions() -> None:
    """Files of ours hold such conditions and refuse every other function; torch 2.14 writes some of its own."""
    size = "L['x'].size()[0]"
    assert forward._arithmetic(f"torch.sym_max({size}, torch.sym_min(2, 3)) > 1") == f"max({size}, min(2, 3)) > 1"


def test_without_conditions_on_sizes_a_graph_is_for_the_examples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    export = torch.export.export

    def without(*args: object, **options: object) -> torch.export.ExportedProgram:
        program = export(*args, **options)  # type: ignore[arg-type]
        del program._guards_code
        return program

    monkeypatch.setattr(torch.export, "export", without)
    graph = capture(Block(), {"x": torch.randn(2, 3, 8)})
    assert not graph.dynamic and "the conditions on sizes are unknown" in graph.reason
    guard = Guard(graph)
    assert guard.leaves({"x": torch.randn(2, 3, 8)}) is not None
    assert guard.leaves({"x": torch.randn(5, 3, 8)}) is None


def test_why_attempts_failed_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(forward.logger, "info", lambda text, *args: said.append(text % args))

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"no such call of {len(x.shape)} axes")

    with pytest.raises(CompileError):
        capture(Asking(), {"x": torch.randn(1, 8)})
    assert said == ["capture with any sizes failed: ValueError: no such call of 2 axes"]


def _alive() -> int:
    gc.collect()
    return sum(isinstance(one, fx.Node | fx.GraphModule) for one in gc.get_objects())


def test_nothing_of_a_capture_stays_behind() -> None:
    model, example = Block().eval(), {"x": torch.randn(2, 3, 8)}
    before = _alive()
    graph = capture(model, example)
    assert _alive() > before
    assert FakeTensorMode.cache_info().size == 0, "what operators answered to sizes, with their symbols"
    del graph
    assert _alive() <= before

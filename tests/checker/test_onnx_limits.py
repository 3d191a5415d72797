"""ONNX files of strangers: sizes, counts and names up to a limit, and no file that is not the model's own."""

from pathlib import Path

import pytest

import twofour
from tests.checker.small import random
from tests.checker.test_onnx import constant, graph, helper, node
from twofour.checker.sources import onnx
from twofour.errors import FormatError


def check(tmp_path: Path, model) -> twofour.checker.Report:
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return twofour.check(tmp_path / "m.onnx")


def refused(tmp_path: Path, model, *texts: str) -> None:
    with pytest.raises(FormatError) as caught:
        check(tmp_path, model)
    for text in texts:
        assert text in str(caught.value)


def shaped(dims: list[int]):
    model = graph([node("MatMul", "x", "w")], [constant("w", random(16, 8))])
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    return model


def test_a_tensor_has_64_axes_at_most(tmp_path: Path) -> None:
    assert check(tmp_path, shaped([1] * 62 + [16, 8])).layers
    refused(tmp_path, shaped([1] * 63 + [16, 8]), "65 axes", "at most 64")
    refused(tmp_path, shaped([1 << 62] * 400_000), "400000 axes", "at most 64")


def test_sizes_whose_product_overflows_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, shaped([1 << 62] * 64), "at most 2^40 values")
    refused(tmp_path, shaped([1 << 32, 1 << 32]), "at most 2^40 values")


def test_zero_points_of_many_axes_are_looked_at(tmp_path: Path) -> None:
    def quantised(axes: int):
        nodes = [node("DequantizeLinear", "w", "s", "z", out="d"), node("MatMul", "x", "d")]
        values = (random(16, 8) * 50).char()
        zero = constant("z", (random(1) * 0 + 3).char())
        del zero.dims[:]
        zero.dims.extend([1] * axes)
        return graph(nodes, [constant("w", values), constant("s", random(1)), zero])

    assert check(tmp_path, quantised(64)).layers
    refused(tmp_path, quantised(65), "65 axes")


def test_names_have_4096_letters_at_most(tmp_path: Path) -> None:
    for length in (4096, 4097):
        name = "w" * length
        model = graph([node("MatMul", "x", name)], [constant(name, random(16, 8))])
        if length == 4096:
            assert check(tmp_path, model).layers
        else:
            refused(tmp_path, model, "4097 letters", "at most 4096")


def inside(depth: int):
    model = graph([node("MatMul", "x", "w")], [constant("w", random(16, 8))])
    for _ in range(depth - 1):
        inner = helper.make_graph(list(model.graph.node), "i", [], [], list(model.graph.initializer))
        model = graph([helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)], [])
        del model.graph.node[0].attribute[1]
    return model


def test_graphs_stand_inside_one_another_30_deep_at_most(tmp_path: Path) -> None:
    assert check(tmp_path, inside(30)).layers
    refused(tmp_path, inside(31), "31 deep", "at most 30")


def test_nodes_operands_and_constants_are_counted(tmp_path: Path, monkeypatch) -> None:
    model = graph([node("MatMul", "x", "w")], [constant("w", random(16, 8))])  # 1 + 3 + 1
    monkeypatch.setattr(onnx, "PARTS", 5)
    assert check(tmp_path, model).layers
    monkeypatch.setattr(onnx, "PARTS", 4)
    refused(tmp_path, model, "at most 4")


def test_many_nodes_that_share_constants_take_time_in_proportion(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x", f"w{number}", out=f"y{number}") for number in range(4000)]
    constants = [constant(f"w{number}", random(2, 2)) for number in range(4000)]
    report = check(tmp_path, graph(nodes, constants))
    assert len(report.skipped) == 4000  # 2 x 2 is too small: each with its reason


def test_one_constant_is_judged_in_64_ways_at_most(tmp_path: Path) -> None:
    def shared(ways: int):
        nodes, constants = [], [constant("w", (random(16, 8) * 50).char()), constant("s", random(1))]
        for way in range(ways):
            constants.append(constant(f"z{way}", (random(1) * 9).char()))
            nodes.append(node("DequantizeLinear", "w", "s", f"z{way}", out=f"d{way}"))
            nodes.append(node("MatMul", "x", f"d{way}", out=f"y{way}"))
        return graph(nodes, constants)

    assert check(tmp_path, shared(64))
    refused(tmp_path, shared(65), "65 ways", "at most 64")


def beside(location: str):
    model = graph([node("MatMul", "x", "w")], [constant("w", random(16, 8))])
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = weight.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return model


@pytest.mark.parametrize("length", [256, 4000, 4096])
def test_a_name_of_external_data_too_long_for_the_system_is_refused(tmp_path: Path, length: int) -> None:
    refused(tmp_path, beside("a" * length), "file name too long")


def test_a_location_longer_than_a_path_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, beside("a/" * 2049), "4098 letters")


def test_external_data_stays_beside_the_model(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_bytes(bytes(8 * 16 * 4))
    (folder / "data").symlink_to(elsewhere)
    refused(folder, beside("data"), "a link to elsewhere")
    (folder / "inside").write_bytes(elsewhere.read_bytes())
    (folder / "link").symlink_to("inside")
    assert check(folder, beside("link")).layers


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """Its snapshots are folders of links to files in one other folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "aa").write_bytes(beside("m.onnx_data").SerializeToString())
    (blobs / "bb").write_bytes(random(16, 8).numpy().tobytes())
    (snapshot / "m.onnx").symlink_to("../../blobs/aa")
    (snapshot / "m.onnx_data").symlink_to("../../blobs/bb")
    assert twofour.check(snapshot / "m.onnx").layers

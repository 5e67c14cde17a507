"""Trees of tensors as safetensors files: what goes in comes out, and damage is always a CheckpointError."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as theirs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.engine.files import (
    Checksum,
    bytes_to_tree,
    check_tree,
    checksum_of,
    load_tensors,
    load_tree,
    save_tensors,
    save_tree,
    tree_to_bytes,
    verify,
)
from podium.errors import CheckpointError

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def assert_same_tree(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same_tree(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_tree(x, y)
    else:
        assert a == b


def a_tree() -> dict[str, Any]:
    return {
        "model": {f"w.{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
        "nothing": None,
        "numbers": [1, -2.5, True, 1e-300, 2**60],
        "pair": (torch.tensor(3.5), "text ü / with slash"),
        "empty": {"dict": {}, "list": [], "tuple": (), "tensor": torch.zeros(0, 4)},
        "by number": {0: torch.ones(1), 7: "seven"},
        "strided": torch.arange(12.0).reshape(3, 4).t(),
    }


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    save_tree(tmp_path / "deep" / "tree.safetensors", a_tree())
    assert_same_tree(load_tree(tmp_path / "deep" / "tree.safetensors"), a_tree())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["tree.safetensors"]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=4), values, max_size=4), st.lists(st.integers(0, 3), max_size=3))
def test_any_tree_comes_back_as_it_was(tree: dict[str, Any], shape: list[int]) -> None:
    whole = {"tree": tree, "tensor": torch.randn(shape)}
    assert_same_tree(bytes_to_tree(tree_to_bytes(whole)), whole)


def test_names_that_look_alike_do_not_collide() -> None:
    tree = {"a": {"b": torch.tensor(1.0)}, "a/b": torch.tensor(2.0), "c": [torch.tensor(3.0)], "c/0": torch.tensor(4.0)}
    assert_same_tree(bytes_to_tree(tree_to_bytes(tree)), tree)


def test_bytes_in_a_key_come_back() -> None:
    """What is saved and cannot be loaded is lost."""
    tree = {"a": {b"x": 1, (2, b"y"): torch.ones(2)}, "b": b"z"}
    assert_same_tree(bytes_to_tree(tree_to_bytes(tree)), tree)


def test_numbers_that_are_not_finite_come_back() -> None:
    back = bytes_to_tree(tree_to_bytes({"loss": math.inf, "t": torch.tensor([math.nan, -math.inf])}))
    assert back["loss"] == math.inf
    assert back["t"].isnan()[0]


def test_loaded_tensors_may_be_written_to() -> None:
    back = bytes_to_tree(tree_to_bytes({"a": torch.zeros(3), "b": torch.zeros(3)}))
    back["a"].add_(1)
    assert back["b"].sum() == 0


def test_a_view_is_saved_by_itself_without_its_storage() -> None:
    large = torch.zeros(100_000)
    assert len(tree_to_bytes({"view": large[:4]})) < 1000


@pytest.mark.parametrize("value", [object(), threading.Lock(), Path("x"), np.array([object()]), {"deep": [object()]}])
def test_what_cannot_be_saved_is_refused_by_name_and_type(value: object) -> None:
    for save in (tree_to_bytes, check_tree):
        with pytest.raises(CheckpointError, match=r"optimizer/x.*cannot be saved"):
            save({"optimizer": {"x": value}})


def test_a_state_that_holds_itself_is_refused() -> None:
    nest: dict[str, Any] = {}
    nest["again"] = nest
    with pytest.raises(CheckpointError, match="holds itself"):
        check_tree(nest)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(0.1),
        np.int16(-3),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.datetime64("2026-01-02"),
        b"bytes",
        b"",
        bytearray(b"more"),
        1j,
        {1, 2},
        frozenset("ab"),
        Counter([3, 3, 5]),
        torch.float16,
        torch.device("cpu"),
        {(0, "a"): 1, np.int64(7): 2, None: 3, True: 4},
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_plain_values_of_any_kind_come_back_with_their_type(value: object) -> None:
    back = bytes_to_tree(tree_to_bytes({"x": value}))["x"]
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3)[:, ::2], np.zeros((0, 3), np.uint16), np.array(["ü"])])
def test_numpy_arrays_come_back_and_may_be_written_to(array: Any) -> None:
    back = bytes_to_tree(tree_to_bytes({"x": array}))["x"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert np.array_equal(back, array)
    assert back.flags.writeable


ODD_DTYPES = (
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)], ids=str)
def test_tensors_of_unusual_types_come_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert_same_tree(bytes_to_tree(tree_to_bytes({"w": tensor})), {"w": tensor})
    save_tensors(tmp_path / "m.safetensors", {"w": tensor, "plain": torch.ones(2)})
    assert_same_tree(load_tensors(tmp_path / "m.safetensors"), {"w": tensor, "plain": torch.ones(2)})


def test_views_with_a_pending_conjugate_or_sign_are_saved_as_they_read() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"conj": z.conj(), "negative": z.conj().imag}
    back = bytes_to_tree(tree_to_bytes(tree))
    assert back["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert back["negative"].tolist() == [-2.0, 4.0]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("make", [lambda: torch.eye(2).to_sparse(), quantized, lambda: torch.ones(2).to("meta")])
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_a_tensor_that_the_format_cannot_hold_is_refused(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    for save in (tree_to_bytes, check_tree):
        with pytest.raises(CheckpointError, match="tensor w: cannot be saved as"):
            save({"w": tensor})


def test_more_text_than_a_reader_takes_is_refused_when_it_is_written() -> None:
    with pytest.raises(CheckpointError, match="must fit into 64 MiB"):
        check_tree({"text": "x" * (65 << 20)})


def test_state_that_is_no_tensor_rides_in_a_model_file(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "layer._extra_state": {"seen": 3, "table": b"abc", "t": torch.zeros(1)}}
    save_tensors(tmp_path / "m.safetensors", state)
    assert_same_tree(load_tensors(tmp_path / "m.safetensors"), state)
    assert torch.equal(theirs.load_file(tmp_path / "m.safetensors")["w"], torch.ones(2))


# Damage.


def test_every_bit_of_a_file_is_covered_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tree(path, {"a": torch.arange(4.0), "n": [1, {"x": None}]})
    whole, unseen = path.read_bytes(), []
    for place in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        try:
            bytes_to_tree(damaged, "a file")
            unseen.append(place)
        except CheckpointError as error:
            assert "a file" in str(error)
    assert unseen == []


def test_every_bit_of_a_model_file_is_covered_by_its_checksum(tmp_path: Path) -> None:
    path, other = tmp_path / "m.safetensors", tmp_path / "other.safetensors"
    save_tensors(path, {"w": torch.arange(3.0)})
    whole = path.read_bytes()
    for place in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        other.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="other"):
            load_tensors(other)
        with pytest.raises(CheckpointError, match="other"):
            verify(other)


def test_a_file_is_told_from_another_whole_one(tmp_path: Path) -> None:
    first = save_tree(tmp_path / "a", {"x": torch.zeros(3)})
    second = save_tree(tmp_path / "b", {"x": torch.ones(3)})
    assert first.size_bytes == second.size_bytes
    assert checksum_of(tmp_path / "a") == first
    verify(tmp_path / "a", first)
    for check in (checksum_of, verify):
        with pytest.raises(CheckpointError, match=r"b: not the file that was written.*must be .*got "):
            check(tmp_path / "b", first)
    with pytest.raises(CheckpointError, match="must have 7 bytes"):
        verify(tmp_path / "a", Checksum(7, first.sha256))


def test_a_file_without_a_checksum_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(tree_to_bytes({"x": torch.ones(2)}))
    assert checksum_of(tmp_path / "old").sha256 == ""
    verify(tmp_path / "old")
    assert_same_tree(load_tree(tmp_path / "old"), {"x": torch.ones(2)})


def test_files_and_the_folders_above_them_are_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def spy(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(os, "fsync", spy)
    save_tree(tmp_path / "new" / "deep" / "t.safetensors", {"x": torch.ones(2)})
    assert flushed == [tmp_path.name, "new", "t.safetensors.partial", "deep"]
    flushed.clear()
    save_tree(tmp_path / "new" / "t.safetensors", {"x": torch.ones(2)}, durable=False)
    assert flushed == []


def test_complex_buffers_survive() -> None:
    rotations = torch.polar(torch.ones(3), torch.arange(3.0))
    assert torch.equal(bytes_to_tree(tree_to_bytes({"w": rotations}))["w"], rotations)


def test_a_file_cut_anywhere_is_a_checkpoint_error() -> None:
    data = tree_to_bytes({"a": torch.arange(10.0), "n": [1, 2]})
    for cut in range(len(data)):
        with pytest.raises(CheckpointError):
            bytes_to_tree(data[:cut], "a file")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_file_with_any_byte_changed_is_read_or_is_a_checkpoint_error(data: st.DataObject) -> None:
    whole = bytearray(tree_to_bytes({"a": torch.arange(4.0), "n": [1, {"x": None}]}))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    try:
        bytes_to_tree(whole, "a file")
    except CheckpointError as error:
        assert "a file" in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4, 8]},
        "text",
        None,
        [],
    ],
)
def test_a_header_that_lies_is_a_checkpoint_error(entry: object, tmp_path: Path) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "lies.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(CheckpointError, match="lies"):
        load_tensors(path)


@pytest.mark.parametrize("text", [b"[]", b"1", b"null", b"\xff\xfe", b'{"__metadata__": 3}', b'{"__metadata__": []}'])
def test_a_header_that_is_no_table_is_a_checkpoint_error(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="a file"):
        bytes_to_tree(len(text).to_bytes(8, "little") + text, "a file")


@pytest.mark.parametrize("plain", ['{"dict"', '{"tensor": "missing"}', '{"dict": [[1]]}', '{"odd": []}', "{}"])
def test_a_damaged_tree_is_a_checkpoint_error(plain: str) -> None:
    text = json.dumps({"__metadata__": {"podium": plain}}).encode()
    with pytest.raises(CheckpointError, match="a file"):
        bytes_to_tree(len(text).to_bytes(8, "little") + text, "a file")


def test_tensors_alone_make_a_plain_safetensors_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(2, dtype=torch.int16)}
    save_tensors(tmp_path / "m.safetensors", tensors)
    assert_same_tree(load_tensors(tmp_path / "m.safetensors"), tensors)
    with pytest.raises(CheckpointError, match="tensors only"):
        load_tree(tmp_path / "m.safetensors")


def test_a_state_dict_of_torch_save_is_read_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    assert load_tensors(tmp_path / "m.pt")["a"].tolist() == [1.0, 1.0]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    torch.save({"a": Path("/somewhere")}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"m\.pt"):
        load_tensors(tmp_path / "m.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="state dict"):
        load_tensors(tmp_path / "list.pt")


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(tmp_path / "nowhere.safetensors")


def test_the_safetensors_package_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    tensors = {f"w.{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors["empty"], tensors["scalar"] = torch.zeros(0, 2), torch.tensor(1.5)
    save_tensors(tmp_path / "ours.safetensors", tensors)
    read = theirs.load_file(tmp_path / "ours.safetensors")
    assert_same_tree({k: read[k] for k in tensors}, tensors)
    theirs.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    again = load_tensors(tmp_path / "theirs.safetensors")
    assert_same_tree({k: again[k] for k in tensors}, tensors)
    save_tree(tmp_path / "tree.safetensors", a_tree())
    assert "strided" in theirs.load_file(tmp_path / "tree.safetensors")


def test_the_same_state_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Its checksum identifies it; the package alone would order the metadata at random."""
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from podium.engine.files import save_tensors\n"
        "tied = torch.ones(3)\n"
        "state = {'b': tied, 'a': tied, 'c': torch.ones(1, dtype=torch.complex128), 'extra': {'n': 1}}\n"
        "print(save_tensors(Path(sys.argv[1]), state).sha256)\n"
    )
    run = [sys.executable, "-c", script, str(tmp_path / "m.safetensors")]
    found = {subprocess.run(run, capture_output=True, text=True, check=True).stdout for _ in range(3)}
    assert len(found) == 1
    assert list(load_tensors(tmp_path / "m.safetensors")) == ["b", "a", "c", "extra"]

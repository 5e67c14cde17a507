"""Readers hand out what was written, map what they can, and name what is wrong with a file."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from podium.data.arrays import read_arrays, read_npy, read_npz, read_pt
from podium.data.base import ArrayDataset
from podium.data.cifar import SAMPLE_BYTES, cifar_files, read_cifar
from podium.data.files import find_file, read_bytes
from podium.data.idx import read_idx, read_idx_pair
from podium.data.joined import JoinedDataset
from podium.data.outside import hugging_face_data, image_to_tensor, torchvision_data
from podium.errors import DataError, MissingExtra, UnknownName
from tests.shared_data import shared_data

CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}
WHOLE_GZIP = gzip.compress(bytes(range(256)) * 40, mtime=0)


def idx_bytes(array: np.ndarray, kind: str = "u1") -> bytes:
    header = bytes([0, 0, CODES[kind], array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(kind).tobytes()


def images(count: int = 6) -> np.ndarray:
    return (np.arange(count * 28 * 28) % 251).astype(np.uint8).reshape(count, 28, 28)


def cifar_bytes(labels: list[int]) -> bytes:
    rows = [
        bytes([label]) + np.full(SAMPLE_BYTES - 1, number, np.uint8).tobytes() for number, label in enumerate(labels)
    ]
    return b"".join(rows)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_mnist(folder: Path, labels: list[int], count: int = 6) -> Path:
    write(folder / "train-images-idx3-ubyte", idx_bytes(images(count)))
    write(folder / "train-labels-idx1-ubyte.gz", idx_bytes(np.array(labels)))
    return folder


class TestIdx:
    @pytest.mark.parametrize("name", ["a-idx", "a-idx.gz"])
    @pytest.mark.parametrize("kind", CODES)
    def test_gives_back_every_type_in_native_byte_order(self, tmp_path: Path, name: str, kind: str) -> None:
        array = np.arange(24).reshape(2, 3, 4)
        got = read_idx(write(tmp_path / name, idx_bytes(array, kind)))
        np.testing.assert_array_equal(got, array)
        assert got.dtype.isnative
        assert torch.from_numpy(np.array(got)).shape == (2, 3, 4)

    def test_bytes_of_an_uncompressed_file_are_mapped_not_loaded(self, tmp_path: Path) -> None:
        got = read_idx(write(tmp_path / "a", idx_bytes(images())))
        assert isinstance(got, np.memmap)
        assert not got.flags.writeable

    def test_a_pair_is_read_packed_or_not(self, tmp_path: Path) -> None:
        pixels, labels = read_idx_pair(write_mnist(tmp_path, [0, 1, 2, 3, 4, 9]), "train")
        np.testing.assert_array_equal(pixels, images())
        assert labels.tolist() == [0, 1, 2, 3, 4, 9]
        assert labels.dtype == np.int64

    def test_labels_outside_the_classes_are_refused_with_their_place(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"train-labels.*0 … 9, got 10 at sample 2"):
            read_idx_pair(write_mnist(tmp_path, [0, 1, 10, 3, 4, 5]), "train")

    def test_lengths_that_disagree_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="each of 6 images, got 5"):
            read_idx_pair(write_mnist(tmp_path, [0] * 5), "train")

    def test_a_missing_file_is_named_with_what_the_folder_has(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz.*but holds train-images"):
            read_idx_pair(write_mnist(tmp_path, [0] * 6), "t10k")

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda whole: b"", "is empty"),
            (lambda whole: whole[:3], "must begin as an IDX file"),
            (lambda whole: b"\x01" + whole[1:], r"must begin as an IDX file.*\[1, 0, 8, 3\]"),
            (lambda whole: whole[:2] + b"\x07" + whole[3:], r"\[0, 0, 7, 3\]"),
            (lambda whole: whole[:9], "header of 16 bytes, but is truncated at 9"),
            (lambda whole: whole[:-1], "is truncated: 4719 bytes"),
            (lambda whole: whole + b"x", "is longer: 4721 bytes"),
        ],
    )
    @pytest.mark.parametrize("name", ["a-idx", "a-idx.gz"])
    def test_a_spoiled_file_is_named(
        self, tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], message: str
    ) -> None:
        path = write(tmp_path / name, spoil(idx_bytes(images())))
        with pytest.raises(DataError, match=message) as caught:
            read_idx(path)
        assert str(path) in str(caught.value)

    def test_an_array_without_samples_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="at least one sample"):
            read_idx(write(tmp_path / "a", idx_bytes(np.zeros((0, 28, 28)))))

    def test_the_sample_files_are_read_whole(self) -> None:
        pixels, labels = read_idx_pair(shared_data("mnist"), "train")
        assert pixels.shape == (8000, 28, 28)
        assert set(labels.tolist()) == set(range(10))


class TestGzip:
    def test_a_truncated_file_says_so(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gz"
        path.write_bytes(WHOLE_GZIP[:-12])
        with pytest.raises(DataError, match=r"a\.gz: must be a whole gzip file, but is truncated"):
            read_bytes(path)

    @pytest.mark.parametrize(
        "content",
        [b"plain text", WHOLE_GZIP[:10] + b"\xff" * 30, WHOLE_GZIP[:-8] + b"\0" * 8],
        ids=["not gzip", "broken block", "wrong checksum"],
    )
    def test_a_corrupt_file_says_so(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "a.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.gz: must be a gzip file, but is corrupt"):
            read_bytes(path)

    def test_a_file_that_is_not_there_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"gone: cannot be read: No such file"):
            read_bytes(tmp_path / "gone")

    def test_a_folder_that_is_not_there_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="there is no such folder"):
            find_file(tmp_path / "gone", "a")


class TestCifar:
    @pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_1.bin.gz"])
    def test_gives_back_images_and_labels(self, tmp_path: Path, name: str) -> None:
        pixels, labels = read_cifar(write(tmp_path / name, cifar_bytes([3, 9, 0])))
        assert labels.tolist() == [3, 9, 0]
        assert pixels.shape == (3, 3, 32, 32)
        assert [int(image.max()) for image in pixels] == [0, 1, 2]
        assert isinstance(pixels, np.memmap) == name.endswith(".bin")

    def test_channels_come_first(self, tmp_path: Path) -> None:
        sample = bytes([1]) + bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([30]) * 1024
        pixels, _ = read_cifar(write(tmp_path / "a.bin", sample))
        assert [int(channel[5, 7]) for channel in pixels[0]] == [10, 20, 30]

    def test_a_truncated_file_says_how_much_it_has(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.bin", cifar_bytes([1, 2])[:-10])
        with pytest.raises(DataError, match=r"a\.bin: must hold whole samples.*1 samples and 3063 bytes"):
            read_cifar(path)

    def test_a_label_outside_the_classes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="got 200 at sample 1"):
            read_cifar(write(tmp_path / "a.bin", cifar_bytes([1, 200])))

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is empty"):
            read_cifar(write(tmp_path / "a.bin", b""))

    def test_as_many_batches_are_found_as_are_there(self, tmp_path: Path) -> None:
        for name in ("data_batch_1.bin", "data_batch_3.bin.gz", "test_batch.bin"):
            write(tmp_path / name, cifar_bytes([0]))
        assert [path.name for path in cifar_files(tmp_path, "train")] == ["data_batch_1.bin", "data_batch_3.bin.gz"]
        assert [path.name for path in cifar_files(tmp_path, "test")] == ["test_batch.bin"]
        with pytest.raises(DataError, match=r"data_batch_1\.bin or data_batch_1\.bin\.gz"):
            cifar_files(tmp_path / "gone", "train")

    def test_the_sample_files_are_read_whole(self) -> None:
        pixels, labels = read_cifar(shared_data("cifar10") / "test_batch.bin.gz")
        assert pixels.shape == (2000, 3, 32, 32)
        assert np.bincount(labels).tolist() == [200] * 10


class TestArrays:
    inputs = np.arange(12, dtype=np.float32).reshape(4, 3)
    targets = np.array([0, 1, 1, 0])

    def save(self, folder: Path, split: str, kind: str) -> None:
        if kind == "npy":
            np.save(folder / f"{split}_inputs.npy", self.inputs)
            np.save(folder / f"{split}_targets.npy", self.targets)
        elif kind == "npz":
            np.savez(folder / f"{split}.npz", inputs=self.inputs, targets=self.targets)
        else:
            pair = torch.from_numpy(self.inputs), torch.from_numpy(self.targets)
            torch.save(
                pair if kind == "pair" else dict(zip(("inputs", "targets"), pair, strict=True)), folder / f"{split}.pt"
            )

    @pytest.mark.parametrize("kind", ["npy", "npz", "pair", "dict"])
    def test_a_folder_gives_train_and_test_set(self, tmp_path: Path, kind: str) -> None:
        for split in ("train", "test"):
            self.save(tmp_path, split, kind)
        for part in read_arrays(tmp_path):
            inputs, targets = part.gather(np.array([2, 0]))
            assert inputs.tolist() == self.inputs[[2, 0]].tolist()
            assert targets.tolist() == [1, 0]

    def test_npy_is_mapped_and_gathered_rows_are_our_own(self, tmp_path: Path) -> None:
        self.save(tmp_path, "train", "npy")
        array = read_npy(tmp_path / "train_inputs.npy")
        assert isinstance(array, np.memmap)
        rows, _ = ArrayDataset(array, self.targets).gather(np.array([0]))
        rows += 1  # a read-only map would refuse
        assert array[0].tolist() == [0, 1, 2]

    def test_a_file_larger_than_what_may_be_loaded_is_read_through_its_map(self, tmp_path: Path) -> None:
        # A sparse file of 256 GiB: nobody loads that in a test, and it takes no room on disk.
        shape = (1 << 26, 1024)
        array = np.lib.format.open_memmap(tmp_path / "a.npy", mode="w+", dtype=np.float32, shape=shape)
        array[-1] = 7
        array.flush()
        data = ArrayDataset(read_npy(tmp_path / "a.npy"), np.broadcast_to(np.int64(1), shape[:1]))
        inputs, targets = data.gather(np.array([0, len(data) - 1]))
        assert inputs.mean(1).tolist() == [0, 7]
        assert targets.tolist() == [1, 1]

    def test_big_endian_arrays_are_gathered(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.inputs.astype(">f4"))
        rows, _ = ArrayDataset(read_npy(tmp_path / "a.npy"), self.targets).gather(np.array([1]))
        assert rows.tolist() == [[3, 4, 5]]

    def test_a_folder_without_arrays_says_what_is_looked_for(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"train_inputs\.npy and train_targets\.npy, train\.npz or train\.pt"):
            read_arrays(tmp_path)

    def test_lengths_that_disagree_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", inputs=self.inputs, targets=self.targets[:3])
        with pytest.raises(DataError, match=r"a\.npz: .*equal length, got 4 and 3"):
            read_npz(tmp_path / "a.npz")

    def test_missing_names_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", x=self.inputs)
        with pytest.raises(DataError, match=r"'inputs' and 'targets', got \['x'\]"):
            read_npz(tmp_path / "a.npz")

    def test_an_empty_array_is_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.inputs[:0])
        with pytest.raises(DataError, match="at least one sample"):
            read_npy(tmp_path / "a.npy")

    def test_objects_are_not_unpickled(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object))
        with pytest.raises(DataError, match=r"a\.npy: must be a plain numpy file"):
            read_npy(tmp_path / "a.npy")
        torch.save({"inputs": Path("x"), "targets": Path("y")}, tmp_path / "a.pt")
        with pytest.raises(DataError, match=r"a\.pt: must hold tensors"):
            read_pt(tmp_path / "a.pt")

    @pytest.mark.parametrize("name", ["train_inputs.npy", "train.npz", "train.pt"])
    @pytest.mark.parametrize("keep", [0, 20, 100])
    def test_a_truncated_file_is_named(self, tmp_path: Path, name: str, keep: int) -> None:
        self.save(tmp_path, "train", {".npy": "npy", ".npz": "npz", ".pt": "pair"}[Path(name).suffix])
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:keep])
        read = {".npy": read_npy, ".npz": read_npz, ".pt": read_pt}[path.suffix]
        with pytest.raises(DataError, match=name):
            read(path)

    def test_a_file_of_the_other_kind_is_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.inputs)
        (tmp_path / "a.npy").rename(tmp_path / "a.npz")
        with pytest.raises(DataError, match=r"must be a \.npz file, but holds a ndarray"):
            read_npz(tmp_path / "a.npz")


class TestJoined:
    def test_parts_are_one_data_set_in_any_order_of_indices(self) -> None:
        values = np.arange(10, dtype=np.float32)[:, None]
        whole = ArrayDataset(values, np.arange(10))
        joined = JoinedDataset([ArrayDataset(values[a:b], np.arange(a, b)) for a, b in ((0, 3), (3, 4), (4, 10))])
        assert len(joined) == 10
        for indices in ([9, 0, 3, 4, 2, 3], [5], []):
            got, want = joined.gather(np.array(indices, int)), whole.gather(np.array(indices, int))
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

    def test_keys_stay_with_their_samples(self) -> None:
        def stamp(inputs: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(keys.astype(np.int64))

        parts = [ArrayDataset(np.zeros(3), np.zeros(3), augment=stamp) for _ in range(2)]
        indices = np.array([4, 1, 5, 0])
        inputs, _ = JoinedDataset(parts).gather(indices, (indices * 10).astype(np.uint64))
        assert inputs.tolist() == [40, 10, 50, 0]

    def test_no_parts_are_refused(self) -> None:
        with pytest.raises(DataError, match="at least one part"):
            JoinedDataset([])


class TestOutside:
    @pytest.mark.parametrize(
        ("package", "ask"),
        [
            ("torchvision", lambda: torchvision_data("MNIST", ".")),
            ("datasets", lambda: hugging_face_data(".", inputs="x", targets="y")),
        ],
    )
    def test_without_the_package_the_extra_is_named(self, package: str, ask: Callable[[], object]) -> None:
        if importlib.util.find_spec(package) is not None:
            pytest.skip(f"{package} is installed")
        with pytest.raises(MissingExtra, match=r"pip install 'podium\[data\]'"):
            ask()

    def test_a_saved_hugging_face_set_is_read_by_column(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_dict({"x": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], "y": [0, 1, 2]})
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "set"))
        inputs, targets = hugging_face_data(tmp_path / "set", inputs="x", targets="y").train.gather(np.array([2, 0]))
        assert (inputs.tolist(), targets.tolist()) == ([[4.0, 5.0], [0.0, 1.0]], [2, 0])
        with pytest.raises(UnknownName, match="unknown column 'z'"):
            hugging_face_data(tmp_path / "set", inputs="z", targets="y")

    def test_pictures_become_numbers_with_channels_first(self) -> None:
        grey, colour = np.full((2, 3), 255, np.uint8), np.zeros((2, 3, 3), np.uint8)
        assert image_to_tensor(grey).tolist() == [[[1.0] * 3] * 2]
        assert image_to_tensor(colour).shape == (3, 2, 3)

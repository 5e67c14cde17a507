"""Folders that are fetched by content, by several processes at once if need be."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from podium.errors import ConfigError, DataError
from podium.launch.hosts import trees
from podium.launch.hosts.trees import Offer, Tree, all_files, fetch


@pytest.fixture
def offer(tmp_path: Path) -> Offer:
    root = tmp_path / "there"
    (root / "deep").mkdir(parents=True)
    (root / "a").write_bytes(b"a" * 1000)
    (root / "deep" / "b").write_bytes(b"")
    return Offer.of("data", root, all_files(root))


def of(offer: Offer) -> trees.Ask:
    return lambda tree, path, offset: offer.chunk(path, offset)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in all_files(folder)}


def test_a_tree_is_fetched_once(offer: Offer, tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(tree: str, path: str, offset: int) -> bytes:
        asked.append(path)
        return offer.chunk(path, offset)

    folder = fetch(offer.tree, tmp_path / "here", ask)
    assert contents(folder) == contents(offer.root) and asked == ["a"]
    assert fetch(offer.tree, tmp_path / "here", ask) == folder and asked == ["a"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == [folder.name], "nothing else is left"


def test_a_damaged_copy_is_replaced(offer: Offer, tmp_path: Path) -> None:
    folder = fetch(offer.tree, tmp_path / "here", of(offer))
    (folder / "a").write_bytes(b"b" * 1000)
    assert contents(fetch(offer.tree, tmp_path / "here", of(offer))) == contents(offer.root)
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_processes_that_fetch_the_same_tree_at_once_all_have_it(offer: Offer, tmp_path: Path) -> None:
    together, found, errors = threading.Barrier(8), list[Path](), list[BaseException]()

    def ask(tree: str, path: str, offset: int) -> bytes:
        together.wait(20)  # all of them have found nothing there
        return offer.chunk(path, offset)

    def run() -> None:
        try:
            found.append(fetch(offer.tree, tmp_path / "here", ask))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(set(found)) == 1
    assert contents(found[0]) == contents(offer.root)
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_files_of_a_copy_that_another_process_reads_stay(offer: Offer, tmp_path: Path) -> None:
    """A slower process finds the whole copy of a faster one, and leaves that alone."""
    late = threading.Event()

    def ask(tree: str, path: str, offset: int) -> bytes:
        if not late.is_set():
            late.set()
            first = fetch(offer.tree, tmp_path / "here", of(offer))
            inodes.append((first / "a").stat().st_ino)
        return offer.chunk(path, offset)

    inodes: list[int] = []
    folder = fetch(offer.tree, tmp_path / "here", ask)
    assert (folder / "a").stat().st_ino == inodes[0]


@pytest.mark.parametrize("was_damaged", [False, True])
def test_a_copy_that_another_process_puts_there_while_this_one_looks_stays(
    offer: Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_damaged: bool
) -> None:
    here, real, looks, inodes = tmp_path / "here", trees._is_whole, [0], list[int]()
    if was_damaged:
        (fetch(offer.tree, here, of(offer)) / "a").write_bytes(b"?" * 1000)

    def is_whole(folder: Path, tree: Tree) -> bool:
        """The second look, when all is fetched, finds nothing whole; at the same moment another process is done."""
        looks[0] += 1
        if looks[0] != 2:
            return real(folder, tree)
        monkeypatch.setattr(trees, "_is_whole", real)
        inodes.append((fetch(offer.tree, here, of(offer)) / "a").stat().st_ino)
        return False

    monkeypatch.setattr(trees, "_is_whole", is_whole)
    folder = fetch(offer.tree, here, of(offer))
    assert (folder / "a").stat().st_ino == inodes[0] and contents(folder) == contents(offer.root)
    assert len(list(here.iterdir())) == 1


def test_what_a_killed_process_left_is_removed_after_an_hour(offer: Offer, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name, age_s in (("old", 2 * 3600.0), ("new", 60.0)):
        (folder := here / f".partial-{name}").mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
        for path in (folder / "part", folder):
            os.utime(path, (time.time() - age_s,) * 2)
    fetch(offer.tree, here, of(offer))
    assert [path.name for path in here.glob(".partial-*")] == [".partial-new"]


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_set(offer: Offer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written: .*XDG_CACHE_HOME"):
        fetch(offer.tree, tmp_path / "file" / "cache", of(offer))


def test_files_that_change_or_end_early_are_refused(offer: Offer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a has changed on the launcher's host"):
        fetch(offer.tree, tmp_path / "here", lambda tree, path, offset: b"b" * 1000)
    with pytest.raises(DataError, match="a ended after 0 of 1000 bytes"):
        fetch(offer.tree, tmp_path / "here", lambda tree, path, offset: b"")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    with pytest.raises(ConfigError, match="below one folder"):
        Tree.from_json(json.dumps({"name": "code-0", "files": {path: [1, "0"]}}).encode())

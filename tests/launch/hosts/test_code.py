"""Which files of the user's code are sent to hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.launch.hosts import code
from podium.launch.hosts.code import user_code


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_the_text_files_beside_a_task_file_are_sent(tmp_path: Path) -> None:
    write(tmp_path, "my.py", "beside.py", "deep/settings.toml", "picture.png", ".git/config.ini", "runs/x.json")
    write(tmp_path, "env/pyvenv.cfg", "env/lib.py")
    found = user_code({"task": f"{tmp_path}/my.py:make"})
    (offer,) = found.offers
    assert set(offer.tree.files) == {"my.py", "beside.py", "deep/settings.toml"}
    assert found.here({"code-0": "/there"}) == ({"task": "/there/my.py:make"}, ())


def test_of_a_package_everything_is_sent_and_python_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "mine/__init__.py", "mine/tasks.py", "mine/words.txt", "common/__init__.py", "data/rows.csv")
    monkeypatch.syspath_prepend(tmp_path)
    found = user_code({"task": "mine.tasks:make"})
    (offer,) = found.offers
    assert set(offer.tree.files) == {"mine/__init__.py", "mine/tasks.py", "mine/words.txt", "common/__init__.py"}
    assert found.here({"code-0": "/there"}) == ({}, ("/there",))


def test_a_package_without_an_init_file_is_sent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "spread/tasks.py", "spread/words.txt")
    monkeypatch.syspath_prepend(tmp_path)
    (offer,) = user_code({"task": "spread.tasks:make"}).offers
    assert set(offer.tree.files) == {"spread/tasks.py", "spread/words.txt"}


def test_code_that_is_installed_or_no_code_is_not_sent() -> None:
    names = {"task": "sklearn.datasets:load_digits", "strategy": "parameter-server:mode=async", "codec": "top-k:k=3"}
    assert user_code(names) == ([], {}, [])
    assert user_code({"task": "podium.tasks.digits:digits_mlp"}) == ([], {}, [])


def test_links_to_folders_are_followed_except_to_those_above(tmp_path: Path) -> None:
    write(tmp_path, "code/my.py", "code/package/tools.py", "library/tools.py", "other/secrets.json")
    (tmp_path / "code" / "alias").symlink_to(tmp_path / "code" / "package")  # which comes first
    (tmp_path / "code" / "library").symlink_to(tmp_path / "library")
    (tmp_path / "library" / "back").symlink_to(tmp_path / "code")
    (tmp_path / "code" / "up").symlink_to(tmp_path)
    (offer,) = user_code({"task": f"{tmp_path}/code/my.py:make"}).offers
    assert set(offer.tree.files) == {"my.py", "alias/tools.py", "package/tools.py", "library/tools.py"}


def test_a_folder_that_may_not_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "my.py", "lost+found/x.py")
    real = Path.iterdir

    def iterdir(path: Path) -> object:  # root may read everything
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    (offer,) = user_code({"task": f"{tmp_path}/my.py:make"}).offers
    assert set(offer.tree.files) == {"my.py"}


def test_a_folder_of_too_much_is_refused_without_looking_at_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "my.py", *(f"a{n}.txt" for n in range(20)), "z/never.txt")
    monkeypatch.setattr(code, "_MOST_FILES", 10)
    looked: list[str] = []
    real = Path.iterdir

    def iterdir(path: Path) -> object:
        looked.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError, match="may hold 10 text files"):
        user_code({"task": f"{tmp_path}/my.py:make"})
    assert "z" not in looked


def test_a_script_and_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "loop.py")
    found = user_code({"task": "digits-mlp"}, str(tmp_path / "loop.py"))
    assert found.settings == {"task": "{code-0}/loop.py"}

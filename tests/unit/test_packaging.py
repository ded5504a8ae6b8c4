"""Packages: the same bytes for the same code, what git ignores left out, and nothing unexpected inside."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from cadenza_api.client import packaging
from cadenza_api.client.packaging import FolderTooLarge, PackagingError, describe, list_files, packed


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return [file.name for file in list_files(folder)]


def digest(folder: Path) -> str:
    with packed(folder) as package:
        return package.sha256


def test_the_package_holds_the_files_and_their_digest(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "print(1)\n", "lib/model.py": "x = 1\n"})
    with packed(tmp_path) as package:
        content = package.path.read_bytes()
        assert package.sha256 == hashlib.sha256(content).hexdigest()
        assert package.reference == f"sha256:{package.sha256}"
        assert (package.size_bytes, package.files) == (len(content), 2)
        with zipfile.ZipFile(package.path) as archive:
            assert archive.testzip() is None
            assert {name: archive.read(name) for name in archive.namelist()} == {
                "lib/model.py": b"x = 1\n",
                "train.py": b"print(1)\n",
            }
    assert not package.path.exists()


def test_time_place_and_order_of_creation_do_not_change_the_package(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"a.py": "1", "b/c.py": "2", "b.py": "3"})
    second = write(tmp_path / "second", {"b.py": "3", "b/c.py": "2", "a.py": "1"})
    os.utime(second / "a.py", (0, 0))
    (second / "a.py").chmod(0o600)
    assert digest(first) == digest(second)


@pytest.mark.parametrize("change", ["content", "name", "executable"])
def test_what_the_job_would_notice_changes_the_package(tmp_path: Path, change: str) -> None:
    write(tmp_path, {"a.py": "1"})
    before = digest(tmp_path)
    match change:
        case "content":
            (tmp_path / "a.py").write_text("2")
        case "name":
            (tmp_path / "a.py").rename(tmp_path / "b.py")
        case _:
            (tmp_path / "a.py").chmod(0o755)
    assert digest(tmp_path) != before


def test_version_control_caches_and_environments_stay_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "train.py": "",
            ".git/config": "",
            "__pycache__/train.cpython-311.pyc": "",
            "lib/__pycache__/x.py": "",
            "lib/old.pyc": "",
            ".venv/bin/python": "",
            "web/node_modules/x/index.js": "",
            ".gitignore": "!.git\n!*.pyc\n",
            "lib/git.py": "",
        },
    )
    assert names(tmp_path) == [".gitignore", "lib/git.py", "train.py"]


TREE = dict.fromkeys(
    ("a.log", "keep.log", "data/x.bin", "data/keep.txt", "src/a.log", "src/data/y.bin", "src/m.py"), ""
)


@pytest.mark.parametrize(
    "rules",
    [
        {".gitignore": "*.log\n"},
        {".gitignore": "*.log\n!keep.log\n"},
        {".gitignore": "data/\n"},
        {".gitignore": "/data/\n"},
        {".gitignore": "data/*\n!data/keep.txt\n"},
        {".gitignore": "data/\n!data/keep.txt\n"},
        {".gitignore": "*.log\n", "src/.gitignore": "!a.log\n"},
        {"src/.gitignore": "/data\n*.log\n"},
        {".gitignore": "src/\n", "src/.gitignore": "!m.py\n"},
        {".gitignore": "# nothing\n\n", "src/.gitignore": "*\n!m.py\n"},
        {".gitignore": "**/data/*.bin\n"},
        {".gitignore": "src/*\n!src/data\n", "src/data/.gitignore": "*.bin\n"},
    ],
)
def test_ignores_what_git_ignores(tmp_path: Path, rules: dict[str, str]) -> None:
    write(tmp_path, TREE | rules)
    git = ["git", "-C", str(tmp_path)]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run([*git, "init", "--quiet"], check=True, env=environment)
    listed = [*git, "ls-files", "--others", "--exclude-standard"]
    output = subprocess.run(listed, check=True, env=environment, capture_output=True, text=True).stdout
    assert names(tmp_path) == sorted(output.splitlines())


def test_a_folder_that_is_too_large_is_refused_before_it_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"part{size}.bin": "x" * 1024 * size for size in range(1, 8)})
    monkeypatch.setattr(packaging, "_write_zip", lambda *_: pytest.fail("it was compressed"))
    with pytest.raises(FolderTooLarge) as caught, packed(tmp_path, limit_bytes=20 * 1024):
        pass
    text = str(caught.value)
    assert "28.0 KiB in 7 files" in text
    assert "20.0 KiB" in text
    assert ".gitignore" in text
    assert [line.split()[-1] for line in text.splitlines()[1:]] == [
        f"part{size}.bin" for size in (7, 6, 5, 4, 3)
    ]


def test_gitignore_brings_a_folder_below_the_limit(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "data.bin": "x" * 5000, ".gitignore": "*.bin\n"})
    with packed(tmp_path, limit_bytes=1000) as package:
        assert package.files == 2


@pytest.mark.parametrize("files", [{}, {"x.pyc": ""}, {"only/__pycache__/x": ""}])
def test_a_folder_without_files_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    with pytest.raises(PackagingError, match="holds no file to upload"), packed(tmp_path):
        pass


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="is not a folder"), packed(tmp_path / "nowhere"):
        pass


def test_a_link_out_of_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret.txt": "s"})
    inside = write(tmp_path / "inside", {"train.py": ""})
    (inside / "lib").mkdir()
    (inside / "lib" / "borrowed").symlink_to(outside / "secret.txt")
    with pytest.raises(PackagingError, match=r"lib/borrowed is a symbolic link out of the folder"):
        list_files(inside)


def test_an_ignored_link_is_nobodys_concern(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", ".gitignore": "data\n"})
    (tmp_path / "data").symlink_to("/")
    assert names(tmp_path) == [".gitignore", "train.py"]


def test_links_inside_the_folder_become_what_they_point_to(tmp_path: Path) -> None:
    write(tmp_path, {"real/model.py": "x = 1"})
    (tmp_path / "alias.py").symlink_to("real/model.py")
    (tmp_path / "copy").symlink_to("real")
    assert names(tmp_path) == ["alias.py", "copy/model.py", "real/model.py"]
    with packed(tmp_path) as package, zipfile.ZipFile(package.path) as archive:
        assert archive.read("alias.py") == archive.read("copy/model.py") == b"x = 1"


def test_a_dangling_link_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    with pytest.raises(
        PackagingError, match=r"gone\.py is a symbolic link to .*nowhere\.py, which does not exist"
    ):
        list_files(tmp_path)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"lib/a.py": ""})
    (tmp_path / "lib" / "up").symlink_to("..")
    with pytest.raises(PackagingError, match="lib/up"):
        list_files(tmp_path)


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackagingError, match="pipe is neither a file nor a folder"):
        list_files(tmp_path)


def test_an_existing_zip_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "code", {"a.py": "1"})
    with packed(tmp_path / "code") as package:
        copy = shutil.copy(package.path, tmp_path / "copy.zip")
        assert describe(Path(copy)).sha256 == package.sha256


@pytest.mark.parametrize("name", ["cadenza.py", "cadenza/plane.py", "cadenza_service/__init__.py"])
def test_code_that_would_hide_ours_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with pytest.raises(PackagingError, match=re.escape(name)), packed(tmp_path):
        pass


@pytest.mark.parametrize("name", ["mine/cadenza.py", "cadenza.yaml", "cadenza_notes.py", "service.py"])
def test_other_names_are_the_users_own(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    with packed(tmp_path) as package:
        assert package.files == 1

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from cadenza_service.jobs.storage import (
    MODEL,
    BadPackage,
    CheckpointNotFound,
    PackageNotFound,
    PackageTooLarge,
    Storage,
)

LIMIT_BYTES = 50_000


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path, package_limit_bytes=LIMIT_BYTES)


def zipped(*entries: tuple[str | zipfile.ZipInfo, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def put(storage: Storage, body: bytes, *, step: int = 7) -> bool:
    chunks = (body[start : start + step] for start in range(0, len(body), step))
    return storage.put_package(hashlib.sha256(body).hexdigest(), chunks)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


CODE = zipped(("train.py", b"print('hello')\n"), ("sub/data.txt", b"x" * 100))
DIGEST = hashlib.sha256(CODE).hexdigest()


def test_a_package_is_kept_once_under_its_digest(storage: Storage, tmp_path: Path) -> None:
    assert put(storage, CODE) is True
    assert put(storage, CODE) is False
    assert storage.package(DIGEST).read_bytes() == CODE
    assert names(tmp_path / "packages") == [f"{DIGEST}.zip"]


def test_an_unknown_package_is_not_found(storage: Storage) -> None:
    with pytest.raises(PackageNotFound, match=DIGEST):
        storage.package(DIGEST)


@pytest.mark.parametrize("digest", ["", "abc", "A" * 64, "../" + "a" * 61])
def test_a_digest_is_64_hex_digits(storage: Storage, digest: str) -> None:
    with pytest.raises(BadPackage, match="not a sha256"):
        storage.package(digest)


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    return info


def damaged() -> bytes:
    body = zipped(("train.py", b"abcdefgh" * 20), compression=zipfile.ZIP_STORED)
    return body.replace(b"abcdefgh", b"abcdefgX", 1)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "not a zip"),
        (b"not a zip at all", "not a zip"),
        (CODE[:-30], "not a zip"),
        (zipped(), "holds no file"),
        (zipped(("folder/", b"")), "holds no file"),
        (zipped(("/etc/passwd", b"x")), "would leave the folder"),
        (zipped(("a/../../b", b"x")), "would leave the folder"),
        (zipped(("a\\..\\b", b"x")), "would leave the folder"),
        (zipped(("C:b", b"x")), "would leave the folder"),
        (zipped((link(), b"/etc/passwd")), "symbolic link"),
        (zipped(("big", b"\0" * (21 * LIMIT_BYTES))), "unpacks to"),
        (zipped(("a", b"x"), compression=zipfile.ZIP_BZIP2), "use deflate"),
        (damaged(), "damaged"),
    ],
)
def test_a_bad_zip_is_refused_and_leaves_nothing(
    storage: Storage, tmp_path: Path, body: bytes, why: str
) -> None:
    with pytest.raises(BadPackage, match=why):
        put(storage, body, step=10_000)
    assert names(tmp_path / "packages") == []


def test_a_zip_with_broken_compression_is_refused(storage: Storage) -> None:
    body = bytearray(zipped(("train.py", bytes(range(256)) * 8)))
    start = body.index(b"train.py") + len("train.py")
    body[start : start + 8] = b"\xff" * 8
    with pytest.raises(BadPackage):
        put(storage, bytes(body))


def test_other_bytes_than_announced_are_refused(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(BadPackage, match="not " + "0" * 64):
        storage.put_package("0" * 64, [CODE])
    assert names(tmp_path / "packages") == []


def test_a_package_stops_at_the_limit(storage: Storage, tmp_path: Path) -> None:
    sent = []

    def endless() -> object:
        while True:
            sent.append(1)
            yield b"\0" * 10_000

    with pytest.raises(PackageTooLarge, match=str(LIMIT_BYTES)):
        storage.put_package(DIGEST, endless())  # type: ignore[arg-type]
    assert len(sent) == 6
    assert names(tmp_path / "packages") == []


def save(storage: Storage, n: int, content: bytes = b"weights", job_id: str = "digits-abc") -> None:
    with storage.checkpoint_writer(job_id, n, round=10 * n, samples=100 * n) as folder:
        (folder / MODEL).write_bytes(content)


def test_checkpoints_are_listed_oldest_first(storage: Storage) -> None:
    for n in (10, 9, 1):
        save(storage, n)
    listed = storage.checkpoints("digits-abc")
    assert [(c.n, c.round, c.samples) for c in listed] == [(1, 10, 100), (9, 90, 900), (10, 100, 1000)]
    assert listed[0].size_bytes == 7
    assert listed[0].sha256 == hashlib.sha256(b"weights").hexdigest()
    assert storage.model_path("digits-abc", 10).read_bytes() == b"weights"
    assert storage.checkpoints("other") == []


def test_a_checkpoint_written_again_replaces_the_first(storage: Storage, tmp_path: Path) -> None:
    save(storage, 1, b"old")
    save(storage, 1, b"new")
    assert storage.model_path("digits-abc", 1).read_bytes() == b"new"
    assert names(tmp_path / "jobs" / "digits-abc" / "checkpoints") == ["1"]


def write_half(storage: Storage) -> None:
    with storage.checkpoint_writer("a-b", 1, round=1, samples=1) as folder:
        (folder / MODEL).write_bytes(b"half")
        raise RuntimeError("disk")


def test_a_writer_that_fails_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="disk"):
        write_half(storage)
    assert names(tmp_path / "jobs" / "a-b" / "checkpoints") == []


def test_a_checkpoint_without_a_model_is_an_error(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError), storage.checkpoint_writer("a-b", 1, round=1, samples=1):
        pass
    assert storage.checkpoints("a-b") == []


def test_only_complete_checkpoints_count(storage: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "a-b" / "checkpoints" / "3"
    folder.mkdir(parents=True)
    (folder / MODEL).write_bytes(b"no manifest")
    assert storage.checkpoints("a-b") == []
    with pytest.raises(CheckpointNotFound):
        storage.model_path("a-b", 3)


def test_leftovers_of_killed_writers_are_removed(storage: Storage, tmp_path: Path) -> None:
    save(storage, 1, job_id="a-b")
    put(storage, CODE)
    checkpoints, packages = tmp_path / "jobs" / "a-b" / "checkpoints", tmp_path / "packages"
    (checkpoints / ".tmp-x").mkdir()
    (checkpoints / ".tmp-x" / MODEL).write_bytes(b"half")
    (packages / ".tmp-y.zip").write_bytes(b"half")
    storage.remove_leftovers("a-b")
    storage.remove_leftovers()
    assert names(checkpoints) == ["1"]
    assert names(packages) == [f"{DIGEST}.zip"]


def test_a_job_id_cannot_leave_its_folder(storage: Storage) -> None:
    with pytest.raises(ValueError, match="job_id"):
        storage.checkpoints("../x")


@pytest.mark.parametrize("name", ["cadenza.py", "cadenza/__init__.py", "cadenza_api/client.py"])
def test_a_zip_that_would_hide_our_packages_is_refused(storage: Storage, name: str) -> None:
    with pytest.raises(BadPackage, match=name):
        put(storage, zipped((name, b"")))

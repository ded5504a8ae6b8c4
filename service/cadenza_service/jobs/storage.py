"""Files that outlive a process: packages of user code and trained models, in one folder.

    packages/<sha256>.zip
    jobs/<job id>/checkpoints/<n>/model.safetensors, manifest.json

Nothing half written is ever visible: a package is renamed into place after its check, a checkpoint's folder
after its manifest, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from cadenza.spec import hides_ours

MODEL = "model.safetensors"
MANIFEST = "manifest.json"

UNPACKED_RATIO = 20
"""A package may unpack to this many times the size limit: source compresses 4 to 6 times, a zip bomb a thousand times."""

BLOCK_BYTES = 2**20

_TEMPORARY = ".tmp-"
"""How the names of unfinished files and folders begin."""


class PackageTooLarge(Exception):
    """The package has more bytes than are taken."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the package has more than {limit_bytes} bytes, the limit; leave data and build results out of it "
            "(a .gitignore does) or raise CADENZA_PACKAGE_LIMIT_BYTES"
        )
        self.limit_bytes = limit_bytes


class BadPackage(ValueError):
    """The bytes are not what they are said to be, or not a zip that may be unpacked."""


class PackageNotFound(LookupError):
    """No package of this digest was uploaded."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no package sha256:{digest} was uploaded; PUT it to /v1/packages/{digest} first")
        self.digest = digest


class CheckpointNotFound(LookupError):
    """The job has no complete checkpoint of this number."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a job."""

    n: int
    round: int
    """The committed round that the weights belong to."""
    samples: int
    size_bytes: int
    sha256: str
    created_at: float
    """Seconds since the Unix epoch."""


class Storage:
    """One folder of packages and checkpoints. Safe to use from several threads and processes."""

    def __init__(self, root: Path, *, package_limit_bytes: int = 100 * 2**20) -> None:
        self._packages = root / "packages"
        self._jobs = root / "jobs"
        self._package_limit_bytes = package_limit_bytes
        self._packages.mkdir(parents=True, exist_ok=True)
        self._jobs.mkdir(parents=True, exist_ok=True)

    # Packages

    def receive_package(self, digest: str) -> PackageUpload:
        """Begin to take the package of this sha256 (64 lower-case hex digits)."""
        return PackageUpload(self._package_path(digest), digest, self._package_limit_bytes)

    def put_package(self, digest: str, chunks: Iterable[bytes]) -> bool:
        """Store a package; returns whether it is new. Raises PackageTooLarge and BadPackage."""
        with self.receive_package(digest) as upload:
            for chunk in chunks:
                upload.write(chunk)
            return upload.finish()

    def package(self, digest: str) -> Path:
        """The package's zip file. Raises PackageNotFound."""
        path = self._package_path(digest)
        if not path.is_file():
            raise PackageNotFound(digest)
        return path

    def _package_path(self, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise BadPackage(f"{digest!r} is not a sha256; give 64 lower-case hex digits")
        return self._packages / f"{digest}.zip"

    # Checkpoints

    @contextmanager
    def checkpoint_writer(self, job_id: str, n: int, *, round: int, samples: int) -> Iterator[Path]:
        """A folder to write ``model.safetensors`` into; at a normal exit it becomes checkpoint ``n`` of the job.

        One that is there already is replaced, so that writing it again after a crash does no harm.
        """
        folder = self._checkpoints(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder))
        try:
            yield scratch
            _write_manifest(scratch, n=n, round=round, samples=samples)
            _replace_folder(scratch, folder / str(n))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """The job's complete checkpoints, oldest first."""
        folder = self._checkpoints(job_id)
        if not folder.is_dir():
            return []
        numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
        found = (_read_manifest(folder / str(n)) for n in numbers)
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def model_path(self, job_id: str, n: int) -> Path:
        """The weights of checkpoint ``n``. Raises CheckpointNotFound unless it is complete."""
        folder = self._checkpoints(job_id) / str(n)
        if _read_manifest(folder) is None:
            raise CheckpointNotFound(f"job {job_id} has no checkpoint {n}")
        return folder / MODEL

    def remove_leftovers(self, job_id: str | None = None) -> None:
        """Delete what killed writers left: in one job's checkpoints, or (None) of uploads.

        Call it only while nobody writes there: at the job's end, or when the service starts.
        """
        folder = self._packages if job_id is None else self._checkpoints(job_id)
        for entry in list(folder.glob(f"{_TEMPORARY}*")):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)

    def _checkpoints(self, job_id: str) -> Path:
        if not re.fullmatch(r"[a-z0-9-]{1,63}", job_id):
            raise ValueError(
                f"job_id: {job_id!r} is not an id of a job; it has lower-case letters, digits and dashes"
            )
        return self._jobs / job_id / "checkpoints"


class PackageUpload:
    """A package on its way in: ``write`` its bytes, then ``finish``; leaving the block early forgets them."""

    def __init__(self, target: Path, digest: str, limit_bytes: int) -> None:
        self._target = target
        self._digest = digest
        self._limit_bytes = limit_bytes
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        handle, name = tempfile.mkstemp(prefix=_TEMPORARY, suffix=".zip", dir=target.parent)
        self._file = os.fdopen(handle, "wb")
        self._path = Path(name)

    def __enter__(self) -> PackageUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Take some bytes. Raises PackageTooLarge."""
        self._size_bytes += len(chunk)
        if self._size_bytes > self._limit_bytes:
            raise PackageTooLarge(self._limit_bytes)
        self._hash.update(chunk)
        self._file.write(chunk)

    def finish(self) -> bool:
        """Check the whole and put it in place; returns whether it is new. Raises BadPackage."""
        found = self._hash.hexdigest()
        if found != self._digest:
            raise BadPackage(
                f"the {self._size_bytes} bytes sent have the sha256 {found}, not {self._digest}; send the file again"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        check_zip(self._path, UNPACKED_RATIO * self._limit_bytes)
        created = not self._target.exists()
        os.replace(self._path, self._target)
        return created


def check_zip(path: Path, unpacked_limit_bytes: int) -> None:
    """Raise BadPackage unless the file is a zip that unpacks into its own folder, and to no more than the limit."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if not any(not entry.is_dir() for entry in entries):
                raise BadPackage("the zip holds no file; send the folder with the job's code")
            for entry in entries:
                _check_entry(entry)
            unpacked_bytes = sum(entry.file_size for entry in entries)
            if unpacked_bytes > unpacked_limit_bytes:
                raise BadPackage(
                    f"the zip unpacks to {unpacked_bytes} bytes, more than {unpacked_limit_bytes}; send less"
                )
            if (damaged := archive.testzip()) is not None:
                raise BadPackage(f"the zip's entry {damaged!r} is damaged; make the zip again")
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadPackage(f"the bytes are not a zip that can be read ({error}); send a zip file") from error


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    # As it stands in the archive: ZipInfo has already cut its own name at a null byte.
    original = entry.orig_filename
    if (
        PurePosixPath(name).is_absolute()
        or ".." in name.split("/")
        or re.search(r"[\\\x00]|^[A-Za-z]:", original)
    ):
        raise BadPackage(
            f"the zip's entry {original!r} would leave the folder it is unpacked into; use relative names"
        )
    if hides_ours(name):
        raise BadPackage(f"the zip's entry {name!r} would hide the package of that name; rename it")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise BadPackage(f"the zip's entry {name!r} is a symbolic link; put the file itself in")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadPackage(
            f"the zip's entry {name!r} is compressed in a way that not every reader knows; use deflate"
        )
    if entry.flag_bits & 0x1:
        raise BadPackage(f"the zip's entry {name!r} is encrypted; send it without a password")


def _write_manifest(folder: Path, *, n: int, round: int, samples: int) -> None:
    model = folder / MODEL
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    manifest = Checkpoint(
        n=n,
        round=round,
        samples=samples,
        size_bytes=model.stat().st_size,
        sha256=digest,
        created_at=time.time(),
    )
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> Checkpoint | None:
    """The checkpoint's manifest, or None where the folder or its manifest is not there."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return Checkpoint(**json.loads(text))


def _replace_folder(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; a folder that stands there goes first, since a rename cannot replace it."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=target.parent))
        os.rename(target, old / "replaced")
        os.rename(source, target)
        shutil.rmtree(old)
    else:
        os.rename(source, target)

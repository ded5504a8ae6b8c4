"""Turns a local folder into the package that carries a job's code.

The package is a zip whose bytes depend only on the files' names, contents and executable bits, so that
the same code has the same digest wherever and whenever it is packed, and is uploaded once. What git would
ignore stays out, and so do version control, caches and environments.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from cadenza.spec import hides_ours
from cadenza_api.sizes import human_bytes
from cadenza_api.user_errors import UserError, bullet_list

PACKAGE_LIMIT_BYTES = 100 * 1024 * 1024
"""The service's default limit; what is larger is data, and belongs on storage that the workers can read."""

NEVER_PACKED = (".git", "__pycache__", ".venv", "node_modules", "*.pyc")
"""Left out whatever .gitignore says: none of it is the job's own code."""

LARGEST_SHOWN = 5
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold, given to every file: a touched file is not a new package."""


class PackagingError(UserError):
    """The folder cannot become a package."""


class FolderTooLarge(PackagingError):
    """The folder's files exceed the limit; names the largest ones."""

    def __init__(self, folder: Path, files: list[PackedFile], limit_bytes: int) -> None:
        total = sum(file.size_bytes for file in files)
        largest = sorted(files, key=lambda file: (-file.size_bytes, file.name))[:LARGEST_SHOWN]
        super().__init__(
            bullet_list(
                f"{folder} holds {human_bytes(total)} in {len(files)} files, and a package may have "
                f"{human_bytes(limit_bytes)}. Name what the job does not need in a .gitignore file. Largest:",
                (f"{human_bytes(file.size_bytes):>10}  {file.name}" for file in largest),
            )
        )


@dataclass(frozen=True)
class PackedFile:
    """One file that goes into the package."""

    name: str
    """Path inside the package, with forward slashes."""

    path: Path
    size_bytes: int
    executable: bool


@dataclass(frozen=True)
class Package:
    """A zip on disk and its digest."""

    path: Path
    sha256: str
    """64 hexadecimal digits."""

    size_bytes: int
    files: int

    @property
    def reference(self) -> str:
        """What ``runtime_env.working_dir`` of a job spec holds."""
        return f"sha256:{self.sha256}"


@contextmanager
def packed(folder: Path, limit_bytes: int = PACKAGE_LIMIT_BYTES) -> Iterator[Package]:
    """Pack ``folder`` into a temporary zip that is gone afterwards.

    Raises PackagingError if the folder is missing, empty, too large (before anything is compressed), or
    holds what a package cannot carry.
    """
    files = list_files(folder)
    if not files:
        raise PackagingError(
            f"{folder} holds no file to upload; check runtime_env.working_dir and the folder's .gitignore"
        )
    for file in files:
        if hides_ours(file.name):
            raise PackagingError(
                f"{folder} holds {file.name}, which would hide Cadenza's package of that name from the workers; rename it"
            )
    if sum(file.size_bytes for file in files) > limit_bytes:
        raise FolderTooLarge(folder, files, limit_bytes)
    with tempfile.TemporaryDirectory(prefix="cadenza-package-") as scratch:
        path = Path(scratch) / "package.zip"
        _write_zip(path, files)
        yield describe(path, len(files))


def describe(path: Path, files: int | None = None) -> Package:
    """The package in an existing zip at ``path``."""
    if files is None:
        with zipfile.ZipFile(path) as archive:
            files = len(archive.namelist())
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Package(path, digest, path.stat().st_size, files)


def list_files(folder: Path) -> list[PackedFile]:
    """The files of ``folder`` that a package of it would hold, sorted by name.

    Raises PackagingError naming the path for a link that leaves the folder or leads nowhere, and for
    anything that is neither a file nor a folder.
    """
    if not folder.is_dir():
        raise PackagingError(f"{folder} is not a folder; check runtime_env.working_dir")
    return sorted(_Walk(folder).files(), key=lambda file: file.name)


class _Walk:
    """One pass over a folder, which keeps the .gitignore rules in force at each depth."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder.resolve()
        self._always = GitIgnoreSpec.from_lines(NEVER_PACKED)

    def files(self) -> Iterator[PackedFile]:
        return self._below(PurePosixPath(), rules=[], parents=frozenset())

    def _below(
        self, here: PurePosixPath, rules: list[_Rules], parents: frozenset[Path]
    ) -> Iterator[PackedFile]:
        folder = self._folder / here
        resolved = folder.resolve()
        if resolved in parents:
            raise PackagingError(
                f"{folder} is a symbolic link to a folder that it lies in; name it in .gitignore or remove it"
            )
        rules = _with_rules_of(folder, here, rules)
        for entry in _entries(folder):
            name = here / entry.name
            if self._ignored(name, rules, is_folder=entry.is_dir()):
                continue
            if entry.is_symlink():
                self._check_link(name)
            if entry.is_dir():
                yield from self._below(name, rules, parents | {resolved})
            else:
                yield self._file(name)

    def _ignored(self, name: PurePosixPath, rules: list[_Rules], *, is_folder: bool) -> bool:
        suffix = "/" if is_folder else ""
        if self._always.match_file(f"{name}{suffix}"):
            return True
        # The rule that is nearest to the file decides, as in git; what no rule mentions is kept.
        for rule in reversed(rules):
            verdict = rule.spec.check_file(f"{name.relative_to(rule.base)}{suffix}").include
            if verdict is not None:
                return verdict
        return False

    def _check_link(self, name: PurePosixPath) -> None:
        path = self._folder / name
        target = path.resolve()
        if not target.is_relative_to(self._root):
            raise PackagingError(
                f"{path} is a symbolic link out of the folder, to {target}; "
                "copy what the job needs into the folder, or name the link in .gitignore"
            )
        if not target.exists():
            raise PackagingError(f"{path} is a symbolic link to {target}, which does not exist; remove it")

    def _file(self, name: PurePosixPath) -> PackedFile:
        path = self._folder / name
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PackagingError(
                f"{path} is neither a file nor a folder; name it in .gitignore or move it away"
            )
        try:
            str(name).encode()
        except UnicodeEncodeError:
            raise PackagingError(f"{str(path)!a} has a name that is not UTF-8; rename it") from None
        return PackedFile(str(name), path, status.st_size, bool(status.st_mode & stat.S_IXUSR))


@dataclass(frozen=True)
class _Rules:
    """The .gitignore of one folder."""

    base: PurePosixPath
    spec: GitIgnoreSpec


def _with_rules_of(folder: Path, here: PurePosixPath, rules: list[_Rules]) -> list[_Rules]:
    file = folder / ".gitignore"
    if not file.is_file():
        return rules
    try:
        spec = GitIgnoreSpec.from_lines(file.read_text(encoding="utf-8").splitlines())
    except (ValueError, OSError) as error:
        raise PackagingError(f"{file} cannot be read: {error}") from error
    return [*rules, _Rules(here, spec)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise PackagingError(f"{folder} cannot be read: {error.strerror}; name it in .gitignore") from error


def _write_zip(path: Path, files: list[PackedFile]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, wherever it is packed: it says how the mode below is read.
            entry.external_attr = (stat.S_IFREG | (0o755 if file.executable else 0o644)) << 16
            try:
                with file.path.open("rb") as source, archive.open(entry, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except OSError as error:
                raise PackagingError(
                    f"{file.path} cannot be packed: {error.strerror}; name it in .gitignore if the job does not need it"
                ) from error

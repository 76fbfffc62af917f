"""Downloads that resume after interruption and are verified before they get their names.

It uses only the standard library: pooch can't resume, since it writes a new temporary file each
time, and it replaces a file whose checksum differs.
"""

import contextlib
import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedpa.data.cache import Tell, progress
from fedpa.errors import DataError, FedpaError, explain, refuse

BLOCK = 2**18
TRY_AGAIN = {408, 429, 500, 502, 503, 504}
"""HTTP statuses after which a retry may succeed."""


class Patience(NamedTuple):
    """How lost connections are retried."""

    attempts: int = 4
    """Consecutive connections without new bytes after which the download fails."""
    timeout: float = 30.0
    """Seconds without a reply after which a connection counts as lost."""
    pause: Callable[[int], None] = lambda failures: time.sleep(2.0**failures / 2)
    """Called with the number of consecutive failures before the next attempt."""


def download(url: str, path: Path, checksum: str, patience: Patience = Patience()) -> Path:
    """Download the file behind `url` as `path`, once its checksum is right.

    checksum: "sha256:…" or "md5:…". Bytes go to `<name>.part`, which a later call continues;
    the file gets its name only when it is complete. An existing `path` is kept if its checksum is
    right, and refused otherwise, since it may be the user's.
    """
    if not checksum.startswith(("sha256:", "md5:")):
        raise refuse("checksum", checksum, 'must be "sha256:…" or "md5:…"')
    check_url("url", url)
    if _is_there(path, checksum):
        return path
    part = path.with_name(path.name + ".part")
    with _refuse_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(part) as file:
            if not _is_there(path, checksum):  # another process may have finished it meanwhile
                _fetch(url, file, part, checksum, patience)
                os.replace(part, path)
    return path


def check_url(field: str, url: str) -> None:
    """Refuse an invalid URL."""
    if not url.startswith(("http://", "https://")):
        raise refuse(field, url, "must begin with https:// or http://")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise refuse(field, url, "must be ASCII without spaces: write other characters as %XX")
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port  # both are only looked at now
    except ValueError as error:
        raise refuse(field, url, f"is not a URL: {error}") from None
    if not host:
        raise refuse(field, url, "names no host")


def compute_checksum(path: Path, like: str) -> str:
    """Compute a file's checksum, "sha256:…" or "md5:…". like: a checksum of the same kind."""
    kind = like.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _is_there(path: Path, checksum: str) -> bool:
    """Whether the file exists with this checksum. Refuses another file of that name."""
    try:
        own = compute_checksum(path, checksum)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FedpaError(f"{path}: can't be read: {explain(error)}") from None
    if own != checksum:
        raise DataError(
            f"{path} exists, but is another file: its checksum is {own}, the original's "
            f"{checksum}. Move it away to download the original"
        )
    return True


@contextlib.contextmanager
def _lock(part: Path) -> Iterator[BinaryIO]:
    """Open the part at its end, locked until it is closed. An empty one is removed."""
    try:
        import fcntl
    except ImportError:
        raise FedpaError(
            f"{part}: this system has no file locks: get the file by other means"
        ) from None
    while True:
        file = part.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FedpaError(
                f"{part}: another process is downloading this file: wait for it, or end it"
            ) from None
        # Between opening and locking, the file may have been finished (and so renamed) or removed.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), part.stat()):
                break
        file.close()
    with file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                if part.stat().st_size == 0:
                    part.unlink()


def _fetch(url: str, file: BinaryIO, part: Path, checksum: str, patience: Patience) -> None:
    """Download the part until it is complete and verified."""
    furthest, failures = _size(file), 0
    with progress(f"downloading {part.stem}") as tell:
        while trouble := _receive(url, file, part, checksum, patience.timeout, tell):
            # Only new bytes count as progress, so that a server that always starts over does not
            # keep this loop running forever.
            size = _size(file)
            failures = failures + 1 if size <= furthest else 1
            furthest = max(furthest, size)
            if failures >= patience.attempts:
                kept = f"; {size:,} bytes are kept: the same command resumes" if size else ""
                raise FedpaError(f"{url}: can't be downloaded: {trouble}{kept}")
            patience.pause(failures)
    os.fsync(file.fileno())
    own = compute_checksum(part, checksum)
    if own != checksum:
        part.unlink()
        raise DataError(
            f"{url}: the checksum of {part.stem} is {own}, should be {checksum}: the file is "
            "not the original or was damaged in transfer. It is removed, try again"
        )


def _receive(
    url: str, file: BinaryIO, part: Path, checksum: str, timeout: float, tell: Tell
) -> str | None:
    """Read from one connection; return the problem if bytes are still missing."""
    size = _size(file)
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if size:
        request.add_header("Range", f"bytes={size}-")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            given = answer.headers.get("Content-Range", "").removeprefix("bytes ")
            if size and not (answer.status == 206 and given.startswith(f"{size}-")):
                size = _empty(file, part)
                if answer.status == 206:
                    return "the server sent another range than asked for"
            length = answer.headers.get("Content-Length")
            total = None if length is None else size + int(length)
            _check_space(part, size, total)
            tell(size, total)
            while block := answer.read(BLOCK):
                with _refuse_disk_errors(part):
                    file.write(block)
                    file.flush()
                size += len(block)
                tell(size, total)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and size:  # there is nothing after what we have
            if compute_checksum(part, checksum) == checksum:
                return None
            _empty(file, part)
            return "the part did not fit the file"
        reason = f"HTTP {error.code} {error.reason}"
        if error.code not in TRY_AGAIN:
            raise FedpaError(f"{url}: can't be downloaded: {reason}") from None
        return reason
    except (OSError, http.client.HTTPException) as error:  # of the connection
        return str(getattr(error, "reason", None) or error) or type(error).__name__
    if total is not None and size < total:
        return f"the connection ended after {size:,} of {total:,} bytes"
    return None


def _empty(file: BinaryIO, part: Path) -> int:
    with _refuse_disk_errors(part):
        return file.truncate(0)


@contextlib.contextmanager
def _refuse_disk_errors(path: Path) -> Iterator[None]:
    """Convert errors of the disk, to distinguish them from errors of the connection."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else explain(error)
        raise FedpaError(f"{path}: can't be written: {reason}") from None


def _check_space(part: Path, size: int, total: int | None) -> None:
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - size > free:
        raise FedpaError(
            f"{part.parent}: the disk has {free:,} bytes free, {part.stem} needs {total - size:,} "
            "more: make room or give another --data-dir"
        )


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size

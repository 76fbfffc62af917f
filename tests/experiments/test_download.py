"""Downloads against a server of our own: no network, and every way a connection can break."""

import errno
import fcntl
import hashlib
import http.server
import importlib.util
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedpa.data.cache import show_progress
from fedpa.errors import DataError
from fedpa.experiments import download as module
from fedpa.experiments.download import Patience, compute_checksum, download
from tests.refusals import refused

CONTENT = np.random.default_rng(0).bytes(3 * 10**6)
SUM = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
pauses: list[int] = []
QUICK = Patience(attempts=3, timeout=5.0, pause=pauses.append)


class Answer(NamedTuple):
    """How the server behaves."""

    ranges: bool = True
    closes_after: tuple[int, ...] = ()
    """Bytes of the body after which the first, second, … connection is closed."""
    status: tuple[int, ...] = ()
    """Statuses given first, before it does what it should."""
    content: bytes = CONTENT
    wrong_range: bool = False
    stalls_after: int | None = None
    """Bytes after which it says nothing more until the test is over."""


@contextmanager
def serving(answer=Answer()):
    """(base url, the Range header of each request)."""
    asked: list[str | None] = []
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            number = len(asked)
            wanted = self.headers.get("Range")
            asked.append(wanted)
            if number < len(answer.status):
                self.send_error(answer.status[number])
                return
            begin = 0
            if wanted and answer.ranges:
                begin = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
                if begin >= len(answer.content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(answer.content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                begin = 7 if answer.wrong_range else begin
                self.send_response(206)
                last = len(answer.content) - 1
                self.send_header("Content-Range", f"bytes {begin}-{last}/{last + 1}")
            else:
                self.send_response(200)
            body = answer.content[begin:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if number < len(answer.closes_after):
                body = body[: answer.closes_after[number]]
            if answer.stalls_after is not None:
                self.wfile.write(body[: answer.stalls_after])
                over.wait(60)
                return
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pauses.clear()


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def test_a_file_is_downloaded_checked_and_then_kept(tmp_path):
    path = tmp_path / "new" / "a.tar.bz2"
    with serving() as (url, asked):
        assert download(url + "a.tar.bz2", path, SUM, QUICK) == path
        assert path.read_bytes() == CONTENT
        download(url + "a.tar.bz2", path, SUM, QUICK)
    assert asked == [None]
    assert [p.name for p in path.parent.iterdir()] == ["a.tar.bz2"]


def test_md5_where_only_that_is_published(tmp_path):
    with serving() as (url, _):
        md5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
        assert compute_checksum(download(url, tmp_path / "a", md5, QUICK), "md5") == md5


def test_progress_is_told_in_bytes(tmp_path):
    told = []

    @contextmanager
    def listener(what):
        told.append(what)
        yield lambda done, total: told.append((done, total))

    with serving() as (url, _), show_progress(listener):
        download(url, tmp_path / "a", SUM, QUICK)
    assert told[:2] == ["downloading a", (0, len(CONTENT))]
    assert told[-1] == (len(CONTENT), len(CONTENT))


def test_a_part_is_continued(tmp_path):
    path = tmp_path / "a"
    part_of(path).write_bytes(CONTENT[:1_000_000])
    with serving() as (url, asked):
        download(url, path, SUM, QUICK)
    assert asked == ["bytes=1000000-"]
    assert path.read_bytes() == CONTENT
    assert not part_of(path).exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_connections_that_end_early_are_resumed(tmp_path, ranges):
    with serving(Answer(ranges, closes_after=(1_000_000, 500_000))) as (url, asked):
        download(url, tmp_path / "a", SUM, QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT
    expected = [None, "bytes=1000000-", "bytes=1500000-" if ranges else "bytes=500000-"]
    assert asked == expected
    assert pauses == ([1, 1] if ranges else [1, 2])


def test_a_server_that_never_sends_all_is_given_up_and_what_came_is_no_file(tmp_path):
    path = tmp_path / "a"
    answer = Answer(ranges=False, closes_after=(1_000_000,) * 9)
    with serving(answer) as (url, asked), refused("1,000,000 bytes"):
        download(url, path, SUM, QUICK)
    assert len(asked) == 3
    assert not path.exists()
    assert part_of(path).stat().st_size == 1_000_000


@pytest.mark.parametrize("left", [len(CONTENT), len(CONTENT) + 5])
def test_a_part_that_is_whole_is_checked_and_one_too_long_begins_anew(tmp_path, left):
    path = tmp_path / "a"
    part_of(path).write_bytes((CONTENT + b"12345")[:left])
    with serving() as (url, asked):
        download(url, path, SUM, QUICK)
    assert path.read_bytes() == CONTENT
    assert asked == [f"bytes={left}-", None][: 1 + (left > len(CONTENT))]


def test_another_range_than_asked_for_is_not_taken(tmp_path):
    path = tmp_path / "a"
    part_of(path).write_bytes(CONTENT[:10])
    with serving(Answer(wrong_range=True)) as (url, asked):
        download(url, path, SUM, QUICK)
    assert path.read_bytes() == CONTENT
    assert asked == ["bytes=10-", None]


@pytest.mark.parametrize("begun", [b"", b"from an older version of the file"])
def test_a_wrong_checksum_is_an_error_and_nothing_is_left(tmp_path, begun):
    path = tmp_path / "a"
    if begun:
        part_of(path).write_bytes(begun)
    content = CONTENT if begun else CONTENT[:-1]
    wrong = hashlib.sha256(begun + content[len(begun) :]).hexdigest()
    error = refused("checksum of a", f"sha256:{wrong}", SUM, kind=DataError)
    with serving(Answer(content=content)) as (url, _), error:
        download(url, path, SUM, QUICK)
    assert not list(tmp_path.iterdir())


def test_a_file_of_somebodys_own_is_not_overwritten(tmp_path):
    (tmp_path / "a").write_text("mine")
    with serving() as (url, asked), refused(str(tmp_path / "a"), kind=DataError):
        download(url, tmp_path / "a", SUM, QUICK)
    assert (tmp_path / "a").read_text() == "mine"
    assert not asked


def test_a_busy_server_is_asked_again_a_missing_file_is_not(tmp_path):
    with serving(Answer(status=(503, 500))) as (url, asked):
        download(url, tmp_path / "a", SUM, QUICK)
        assert len(asked) == 3
    with serving(Answer(status=(404,))) as (url, asked), refused("404"):
        download(url + "b", tmp_path / "b", SUM, QUICK)
    assert len(asked) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_nobody_listening(tmp_path):
    with serving() as (url, _):
        pass
    with refused(url):
        download(url, tmp_path / "a", SUM, QUICK)
    assert pauses == [1, 2]
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_one_part(tmp_path):
    with part_of(tmp_path / "a").open("ab") as file, serving() as (url, asked):
        fcntl.flock(file, fcntl.LOCK_EX)
        with refused(str(part_of(tmp_path / "a"))):
            download(url, tmp_path / "a", SUM, QUICK)
        assert not asked
        fcntl.flock(file, fcntl.LOCK_UN)
        download(url, tmp_path / "a", SUM, QUICK)


def test_a_full_disk(tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, block):
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

    fetch = module._fetch
    monkeypatch.setattr(module, "_fetch", lambda url, file, *rest: fetch(url, Full(file), *rest))
    with serving() as (url, _), refused(str(tmp_path)):
        download(url, tmp_path / "a", SUM, QUICK)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_known_before_the_first_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("U", (), {"free": 10}))
    with serving() as (url, _), refused("10 bytes", "a"):
        download(url, tmp_path / "a", SUM, QUICK)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "checksum", "field"),
    [
        ("ftp://here/a", SUM, "url"),
        ("/etc/passwd", SUM, "url"),
        ("http://[x", SUM, "url"),
        ("http://here:port/a", SUM, "url"),
        ("http:///a", SUM, "url"),
        ("http://here/ä", SUM, "url"),
        ("http://here/a b", SUM, "url"),
        ("http://here/a\nb", SUM, "url"),
        ("http://127.0.0.1:1/a", "crc:1", "checksum"),
    ],
)
def test_bad_requests_are_refused(tmp_path, url, checksum, field):
    value = {"url": url, "checksum": checksum}[field]
    with refused(f"{field} = {value!r}"):
        download(url, tmp_path / "a", checksum, QUICK)
    assert not list(tmp_path.iterdir())


def test_a_directory_in_the_files_place_is_told(tmp_path):
    (tmp_path / "a").mkdir()
    with refused(str(tmp_path / "a"), "Is a directory"):
        download("http://127.0.0.1:1/a", tmp_path / "a", SUM, QUICK)


def test_a_file_that_cant_be_read_is_told(tmp_path, monkeypatch):
    """For root every file is readable: the system's answer is given in its place."""

    def denied(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(Path, "open", denied)
    with refused(str(tmp_path / "a"), "Permission denied"):
        download("http://127.0.0.1:1/a", tmp_path / "a", SUM, QUICK)


def test_without_locks_the_package_is_imported_and_downloads_are_refused(tmp_path, monkeypatch):
    """As on Windows, which has no fcntl."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("fresh_download", module.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    with refused("locks"):
        fresh.download("http://127.0.0.1:1/a", tmp_path / "a", SUM)
    assert not list(tmp_path.iterdir())

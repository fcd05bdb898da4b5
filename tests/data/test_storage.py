"""Shards wherever they are: names expanded, bytes exact, remote ones fetched once, whole, within a limit; failures retried and named."""

from __future__ import annotations

import errno
import http.server
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_megascale.data import shard_cache, storage
from lightning_megascale.data.index import ShardError, open_index
from lightning_megascale.data.patience import StorageError, attempt, watched
from lightning_megascale.data.storage import ShardStore, expand
from tests.data.tars import files, tar_bytes, write_tar

FORK = multiprocessing.get_context("fork")


class Server:
    """A local HTTP server over a folder; ``plan`` holds what happens to the next requests for a tar."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan, self.heads, self.log = folder, [], [], folder.parent / "log"
        self.log.touch()
        owner = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=str(folder))

            def do_GET(self) -> None:
                name = self.path.split("?")[0].rsplit("/", 1)[-1]
                with owner.log.open("a") as file:
                    file.write(f"{name}\n")
                action = owner.plan.pop(0) if owner.plan and name.endswith(".tar") else None
                if isinstance(action, int):
                    self.send_error(action)
                elif action in ("cut", "stall"):
                    data = (folder / name).read_bytes()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    if action == "stall":
                        time.sleep(2.5)
                    self.close_connection = True
                else:
                    if action == "slow":
                        time.sleep(0.5)
                    super().do_GET()

            def do_HEAD(self) -> None:
                if owner.heads:
                    self.send_error(owner.heads.pop(0))
                else:
                    super().do_HEAD()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def gets(self, name: str) -> int:
        return self.log.read_text().split().count(name)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="fsspec[http]")
    (tmp_path / "served").mkdir()
    for number in range(4):
        write_tar(tmp_path / "served" / f"{number:03d}.tar", 5, first=10 * number)
    running = Server(tmp_path / "served")
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def memory() -> Iterator[str]:
    system, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for number in range(6):
        system.pipe(f"{folder}/{number:03d}.tar", tar_bytes(files(5, first=10 * number)))
    yield f"memory:/{folder}"
    system.rm(folder, recursive=True)


def store_of(tmp_path: Path, **options: object) -> ShardStore:
    return ShardStore(tmp_path / "cache", **{"backoff_seconds": 0.01, "timeout_seconds": 20.0, **options})


def copies(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "shards").iterdir())


# Names


def test_expand_local_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a-000.tar", "a-001.tar", "a-010.tar", "b.tar", "odd[1].tar"):
        (tmp_path / name).touch()
    for name in ("b.tar.idx", "b.tar.idx.tokens-00ff", "b.tar.idx.1-2.tmp"):
        (tmp_path / name).touch()
    assert expand("a-{000..001}.tar") == ["a-000.tar", "a-001.tar"]
    assert expand(["b*", Path("a-*.tar"), "{b,a-001}.tar"]) == ["a-000.tar", "a-001.tar", "a-010.tar", "b.tar"]
    assert expand("a-0?[01].tar") == ["a-000.tar", "a-001.tar", "a-010.tar"]
    assert expand("odd[1].tar") == ["odd[1].tar"] and expand("~/b.tar") == [str(tmp_path / "b.tar")]
    assert expand(f"file://{tmp_path}/b.tar") == [str(tmp_path / "b.tar")]


@pytest.mark.parametrize(
    ("urls", "text"),
    [
        ("a-{000..002}.tar", r"urls='a-002.tar' does not exist; the nearest existing names are 'a-00[01].tar', 'a-00[01].tar'"),
        ("c*.tar", r"urls='c\*.tar' matches no file; the nearest existing names are "),
        ("*.zip", r"matches no file; its folder holds 3 other names"),
        ("fodler/x.tar", r"does not exist: there is no folder '.*fodler'; the nearest existing names are 'folder'"),
        ("fodler/*.tar", "there is no folder 'fodler'"),
        ("folder", r"is a folder; write 'folder/\*.tar'"),
        ("a-{000..", r"write ranges as \{000..009\}"),
        ("a-{0..999}-{0..1000}.tar", "more than 1,000,000 names"),
        ([], "name at least one shard"),
        ("nope://x/*.tar", "Protocol not known: nope"),
    ],
)
def test_names_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: str, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("a-000.tar", "a-001.tar"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=text):
        expand(urls)


def test_expand_remote_names(memory: str, server: Server) -> None:
    name = memory.removeprefix("memory://").strip("/")
    assert expand(f"{memory}/00[0-2].tar") == [f"memory:///{name}/{n:03d}.tar" for n in range(3)]
    assert expand(f"{memory}/{{000..001}}.tar") == [f"{memory}/000.tar", f"{memory}/001.tar"]
    with pytest.raises(ValueError, match=r"matches nothing; the nearest existing names are '00"):
        expand(f"{memory}/x00*.tar")
    with pytest.raises(ValueError, match="matches nothing; there is no folder 'memory:///nowhere'"):
        expand("memory://nowhere/*.tar")
    (server.folder / "000.tar.idx").touch()
    assert expand(f"{server.url}/*.tar*") == [f"{server.url}/{n:03d}.tar" for n in range(4)]
    signed = f"{server.url}/000.tar?key=a*b"
    assert expand(signed) == [signed]


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("http://h/x.tar", "aiohttp", "http"), ("s3://b/x.tar", "s3fs", "s3"), ("gs://b/x.tar", "gcsfs", "gs")]
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for action in (lambda: store_of(tmp_path).read(url, 0, 1), lambda: expand(url.replace("x", "*"))):
        with pytest.raises(ValueError, match=rf"urls='{url[:4]}.*pip install 'fsspec\[{extra}\]'"):
            action()


# Local shards


def test_local_reads_are_exact_with_more_shards_than_open_files(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", 2, first=n) for n in range(50)]
    store = store_of(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for number, path in enumerate(paths):
            index = open_index(path, tmp_path / "cache")
            assert store.read(str(path), *index.span(0, "txt")) == f"caption {number}".encode()
    assert len(os.listdir("/proc/self/fd")) <= before + storage.OPEN_FILES + 50
    assert len(store._files) == storage.OPEN_FILES and store.local(f"file://{paths[3]}") == paths[3]
    assert store.wait_seconds == 0 and store.read(str(paths[0]), 5, 0) == b""


def test_a_missing_local_shard_and_bytes_behind_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "shard-000.tar", 2)
    store = store_of(tmp_path, retries=1)
    with pytest.raises(FileNotFoundError, match=r"shard-00.tar' does not exist; the nearest existing names are 'shard-000.tar'"):
        store.read(str(tmp_path / "shard-00.tar"), 0, 1)
    size = path.stat().st_size
    with pytest.raises(
        OSError, match=rf"reading .*shard-000.tar: attempt 2 of 2 failed: it ends at byte {size:,}, and bytes {size - 5:,} .."
    ):
        store.read(str(path), size - 5, 6)
    assert store.read(str(path), size - 5, 5) == bytes(5)


def test_a_local_read_error_is_tried_again_and_named_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "x.tar", 2)
    store, pread, left = store_of(tmp_path), os.pread, [3]

    def flaky(descriptor: int, size: int, offset: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, min(size, 7), offset)  # and short reads, as signals cause them

    monkeypatch.setattr(os, "pread", flaky)
    assert store.read(str(path), 0, 600) == path.read_bytes()[:600] and left == [0]
    left[0] = 100
    with pytest.raises(OSError, match=r"reading .*x.tar: attempt 4 of 4 failed: .*Input/output error") as caught:
        store.read(str(path), 0, 600)
    assert not isinstance(caught.value, ValueError) and left == [95]


# Remote shards


@pytest.mark.parametrize("kind", ["memory", "http"])
def test_remote_reads_equal_local_ones(tmp_path: Path, memory: str, server: Server, kind: str) -> None:
    folder = memory if kind == "memory" else server.url
    store = store_of(tmp_path)
    for number in range(4):
        url = f"{folder}/{number:03d}.tar"
        index = store.index(url)
        assert index.samples == 5 and index.key(4) == f"{10 * number + 4:06d}"
        for row in range(5):
            assert store.read(url, *index.span(row, "txt")) == f"caption {10 * number + row}".encode()
        assert store.local(url).read_bytes() == tar_bytes(files(5, first=10 * number))
    assert len(copies(tmp_path)) == 4 and store.wait_seconds > 0
    if kind == "http":
        assert [server.gets(f"{n:03d}.tar") for n in range(4)] == [1] * 4
    assert [index.samples for index in store.indexes([f"{folder}/{n:03d}.tar" for n in range(4)])] == [5] * 4


def test_the_index_stays_when_the_copy_goes_and_is_taken_from_beside_the_shard(tmp_path: Path, server: Server) -> None:
    url = f"{server.url}/000.tar"
    store_of(tmp_path).index(url)
    for copy in copies(tmp_path):
        copy.unlink()
    assert store_of(tmp_path).index(url).key(0) == "000000" and server.gets("000.tar") == 1
    open_index(server.folder / "001.tar", tmp_path)
    (server.folder / "002.tar.idx").write_bytes(b"<html>")
    (server.folder / "003.tar.idx").write_bytes((server.folder / "001.tar.idx").read_bytes())
    with (server.folder / "003.tar").open("ab") as file:  # of another size than that index says
        file.write(bytes(1024))
    store = store_of(tmp_path)
    assert [store.index(f"{server.url}/00{n}.tar").key(0) for n in (1, 2, 3)] == ["000010", "000020", "000030"]
    assert [server.gets(f"00{n}.tar") for n in (1, 2, 3)] == [0, 1, 1]
    with pytest.raises(ValueError, match="megascale data index"):
        store_of(tmp_path / "other").index(url, build=False)


def test_a_damaged_remote_shard_is_named_by_its_address(tmp_path: Path, server: Server) -> None:
    (server.folder / "bad.tar").write_bytes(tar_bytes(files(5))[:3000])
    with pytest.raises(ShardError, match=rf"^{server.url}/bad.tar: at byte .* truncated"):
        store_of(tmp_path).index(f"{server.url}/bad.tar?token=secret")


def test_a_flaky_server_is_asked_again(tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_megascale.data")
    server.plan += [503, "cut", 500]
    data = store_of(tmp_path).read(f"{server.url}/000.tar?token=secret", 0, 2000)
    assert data == tar_bytes(files(5))[:2000] and server.gets("000.tar") == 4 and len(copies(tmp_path)) == 1
    assert "attempt 1 of 4 failed: 503" in caplog.text and "attempt 3 of 4 failed: 500" in caplog.text and "secret" not in caplog.text


def test_a_failed_question_for_the_size_is_asked_again(tmp_path: Path, server: Server) -> None:
    server.heads, server.plan = [503], [503]  # fsspec asks by HEAD, then by GET, and calls what fails "not found"
    assert store_of(tmp_path).read(f"{server.url}/000.tar", 0, 9) == tar_bytes(files(1))[:9]
    assert server.heads == server.plan == [] and server.gets("000.tar") == 2


def test_a_transfer_that_ends_early_without_an_error_is_no_shard(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = tar_bytes(files(5)), []

    def get_file(_: object, path: str, place: str) -> None:
        calls.append(path)
        Path(place).write_bytes(good[: 512 * len(calls)] if len(calls) < 3 else good)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", get_file)
    assert store_of(tmp_path).local(f"{memory}/000.tar").read_bytes() == good and len(calls) == 3
    calls.clear()
    with pytest.raises(OSError, match=rf"attempt 2 of 2 failed: 1,024 of {len(good):,} bytes arrived"):
        store_of(tmp_path / "other", retries=1).local(f"{memory}/000.tar")


def test_a_server_that_never_delivers(tmp_path: Path, server: Server) -> None:
    server.plan += ["cut"] * 9
    store = store_of(tmp_path, retries=2)
    with pytest.raises(OSError, match=rf"fetching {server.url}/000.tar: attempt 3 of 3 failed: ") as caught:
        store.local(f"{server.url}/000.tar?token=secret")
    assert "secret" not in str(caught.value) and server.gets("000.tar") == 3 and copies(tmp_path) == []
    server.plan.clear()
    assert store.read(f"{server.url}/000.tar", 0, 9) == tar_bytes(files(1))[:9]


@pytest.mark.parametrize("status", [403, 404])
def test_what_the_server_refuses_is_not_asked_again(tmp_path: Path, server: Server, status: int) -> None:
    store = store_of(tmp_path)
    store._state(f"{server.url}/000.tar")
    server.plan += [status] * 9
    with pytest.raises(OSError, match=rf"fetching {server.url}/000.tar"):
        store.read(f"{server.url}/000.tar", 0, 1)
    assert server.gets("000.tar") == 1
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tar"):
        store.read(f"{server.url}/nowhere.tar", 0, 1)


def test_a_stalled_transfer_ends(tmp_path: Path, server: Server) -> None:
    server.plan += ["stall", None]
    start = time.monotonic()
    assert store_of(tmp_path, timeout_seconds=0.4).read(f"{server.url}/000.tar", 0, 9) == tar_bytes(files(1))[:9]
    assert server.gets("000.tar") == 2 and time.monotonic() - start < 60


def test_watched_counts_from_the_last_progress() -> None:
    progress = [0]

    def work() -> str:
        for _ in range(6):
            time.sleep(0.1)
            progress[0] += 1
        time.sleep(0.6)
        return "done"

    assert watched(work, 0.9, lambda: progress[0]) == "done"
    with pytest.raises(TimeoutError, match="no byte arrived for 0.3 s"):
        watched(lambda: time.sleep(3), 0.3)
    with pytest.raises(KeyError):
        watched(lambda: {}["x"], 5)


def test_attempt_counts_and_leaves_other_errors_alone() -> None:
    tries = []

    def fail(error: BaseException) -> None:
        tries.append(1)
        raise error

    with pytest.raises(StorageError, match="attempt 3 of 3 failed: odd"):
        attempt("w", lambda: fail(OSError("odd")), 2, 0.0)
    assert len(tries) == 3
    for error, raised in ((PermissionError("no"), StorageError), (OSError(errno.ENOSPC, "full"), StorageError), (KeyError("x"), KeyError)):
        tries.clear()
        with pytest.raises(raised):
            attempt("w", lambda error=error: fail(error), 5, 0.0)
        assert len(tries) == 1


def test_a_new_version_of_a_remote_shard_is_fetched(tmp_path: Path, memory: str) -> None:
    url, system = f"{memory}/000.tar", fsspec.filesystem("memory")
    assert store_of(tmp_path).index(url).key(0) == "000000"
    system.pipe(url, tar_bytes(files(5, first=70)))  # of the same size
    store = store_of(tmp_path)
    index = store.index(url)
    assert index.key(0) == "000070" and store.read(url, *index.span(0, "txt")) == b"caption 70"


def test_a_new_version_on_a_server_that_tells_only_the_time(tmp_path: Path, server: Server) -> None:
    url, place = f"{server.url}/000.tar", tmp_path / "served" / "000.tar"
    assert store_of(tmp_path).index(url).key(0) == "000000"
    size = place.stat().st_size
    write_tar(place, 5, first=70)
    os.utime(place, (place.stat().st_atime, place.stat().st_mtime + 5))
    assert place.stat().st_size == size
    store = store_of(tmp_path)
    index = store.index(url)
    assert index.key(0) == "000070" and store.read(url, *index.span(0, "txt")) == b"caption 70"


def test_a_damaged_copy_can_be_discarded_and_a_short_one_is_never_used(tmp_path: Path, memory: str) -> None:
    url, good = f"{memory}/000.tar", tar_bytes(files(5))
    store = store_of(tmp_path)
    copy = store.local(url)
    copy.write_bytes(b"\xff" * len(good))
    assert store.read(url, 0, 9) == b"\xff" * 9
    store.discard(url)
    assert store.read(url, 0, 9) == good[:9]
    store.local(url).write_bytes(good[:100])
    assert store_of(tmp_path).read(url, 0, 2000) == good[:2000]
    store.local(url).write_bytes(good[:100])
    assert store.read(url, 0, 2000) == good[:2000]  # also where it was open
    local = write_tar(tmp_path / "x.tar", 1)
    store.read(str(local), 0, 1)
    store.discard(str(local))
    assert local.exists()


# The limit


def test_the_limit_removes_what_was_used_least_recently_but_nothing_open(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(tar_bytes(files(5)))
    urls = [f"{memory}/{n:03d}.tar" for n in range(6)]
    store = store_of(tmp_path, limit_bytes=3 * size)
    for url in urls[:3]:
        store.read(url, 0, 1)
    with pytest.warns(UserWarning, match=rf"grows to {4 * size:,} bytes, above limit_bytes={3 * size:,}"):
        store.read(urls[3], 0, 1)  # all are open
    monkeypatch.setattr(storage, "OPEN_FILES", 1)
    store._files.clear()
    paths = [store.local(url) for url in (urls[1], urls[2], urls[0], urls[3])]  # so 1 is the oldest now, then 2
    (copy := paths[0]).with_name(copy.name + ".idx").touch()
    store.read(urls[4], 0, 1)
    assert [path.exists() for path in paths] == [False, False, True, True] and len(copies(tmp_path)) == 3
    assert store.read(urls[1], 0, 999) == tar_bytes(files(5, first=10))[:999]  # comes back
    assert sum(path.stat().st_size for path in copies(tmp_path)) == 3 * size
    with pytest.raises(ValueError, match=rf"limit_bytes={size - 1:,}: memory://.*/005.tar alone has {size:,} bytes"):
        store_of(tmp_path, limit_bytes=size - 1).read(urls[5], 0, 1)


def _hold(folder: Path, url: str, pipe: object) -> None:
    store = store_of(folder)
    store.read(url, 0, 1)
    pipe.send("open")
    pipe.recv()
    pipe.send(store.read(url, 512, 3))


def test_a_shard_that_another_process_has_open_stays(tmp_path: Path, memory: str) -> None:
    size, (here, there) = len(tar_bytes(files(5))), FORK.Pipe()
    process = FORK.Process(target=_hold, args=(tmp_path, f"{memory}/000.tar", there))
    process.start()
    assert here.recv() == "open"
    held = copies(tmp_path)
    store = store_of(tmp_path, limit_bytes=2 * size)
    for number in range(1, 5):
        store._files.clear()
        store.read(f"{memory}/{number:03d}.tar", 0, 1)
    assert held[0] in copies(tmp_path) and len(copies(tmp_path)) == 2
    here.send("go")
    assert here.recv() == tar_bytes(files(5))[512:515]
    process.join(20)
    for number in (5, 1):
        store._files.clear()
        store.read(f"{memory}/{number:03d}.tar", 0, 1)
    assert held[0] not in copies(tmp_path) and len(copies(tmp_path)) == 2


def test_without_locks_it_still_reads_and_evicts(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    size = len(tar_bytes(files(5)))
    store = store_of(tmp_path, limit_bytes=2 * size)
    for number in range(5):
        assert store.read(f"{memory}/{number:03d}.tar", 0, 600) == tar_bytes(files(5, first=10 * number))[:600]
    assert len(copies(tmp_path)) == 2
    assert store.read(f"{memory}/000.tar", 512, 9) == tar_bytes(files(5))[512:521]  # removed, but open here


# Several processes


def _read_at_once(folder: Path, url: str, barrier: object, results: object) -> None:
    barrier.wait(20)
    store = store_of(folder)
    results.put((store.read(url, 0, 3000), store.index(url).samples))


def test_processes_fetch_a_shard_once_together(tmp_path: Path, server: Server) -> None:
    results, barrier, url = FORK.Queue(), FORK.Barrier(3), f"{server.url}/000.tar"
    server.plan += ["slow"] * 3
    store_of(tmp_path / "parent").read(f"{server.url}/003.tar", 0, 1)  # so that fsspec's own thread runs before the fork
    server.plan[:] = ["slow"] * 3
    processes = [FORK.Process(target=_read_at_once, args=(tmp_path, url, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=30) for _ in processes] == [(tar_bytes(files(5))[:3000], 5)] * 3
    for process in processes:
        process.join(20)
    assert server.gets("000.tar") == 1 and len(copies(tmp_path)) == 1


def _die_while_fetching(folder: Path, url: str) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    store_of(folder).local(url)


def test_a_killed_fetch_is_done_again_and_its_rest_removed(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, size = f"{memory}/000.tar", len(tar_bytes(files(5)))
    process = FORK.Process(target=_die_while_fetching, args=(tmp_path, url))
    process.start()
    process.join(30)
    (rest,) = copies(tmp_path)
    assert process.exitcode == -signal.SIGKILL and rest.name.endswith(".tmp") and rest.stat().st_size == size
    store = store_of(tmp_path, limit_bytes=size)
    with pytest.warns(UserWarning, match="above limit_bytes"):  # too young to be sure that nobody writes it
        assert store.read(url, 0, 9) == tar_bytes(files(1))[:9]
    os.utime(rest, (0, 0))
    store._files.clear()
    store.read(f"{memory}/001.tar", 0, 9)
    assert len(copies(tmp_path)) == 1 and not rest.exists()


def _read_in_child(store: ShardStore, urls: list[str], results: object) -> None:
    results.put([store.read(url, 0, 700) for url in urls])


def test_a_store_works_after_a_fork_and_a_pickle(tmp_path: Path, server: Server) -> None:
    store, urls = store_of(tmp_path, limit_bytes=1 << 20, retries=7), [f"{server.url}/{n:03d}.tar" for n in range(3)]
    store.read(urls[0], 0, 1)
    store.prefetch(urls[:2])
    results = FORK.Queue()
    store._lock.acquire()  # as when a thread holds it at the moment of the fork
    process = FORK.Process(target=_read_in_child, args=(store, urls, results))
    process.start()
    store._lock.release()
    expected = [tar_bytes(files(5, first=10 * n))[:700] for n in range(3)]
    assert results.get(timeout=30) == expected
    process.join(20)
    again = pickle.loads(pickle.dumps(store))
    assert (again.cache_dir, again.limit_bytes, again.retries) == (store.cache_dir, 1 << 20, 7)
    assert [again.read(url, 0, 700) for url in urls] == expected == [store.read(url, 0, 700) for url in urls]


def test_threads_read_while_others_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OPEN_FILES", 2)
    paths = [str(write_tar(tmp_path / f"{n}.tar", 2, first=10 * n)) for n in range(8)]
    contents, store, wrong = [Path(path).read_bytes() for path in paths], store_of(tmp_path), []

    def read(start: int) -> None:
        for step in range(300):
            number = (start + step * 3) % 8
            if store.read(paths[number], 0, 1024) != contents[number][:1024]:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and len(store._files) <= 2


# Ahead of need


def settled(store: ShardStore) -> None:
    thread = store._thread
    if thread is not None:
        thread.join(30)


def test_prefetch_fetches_in_order_and_stops_at_half_the_limit(tmp_path: Path, memory: str) -> None:
    size, urls = len(tar_bytes(files(5))), [f"{memory}/{n:03d}.tar" for n in range(6)]
    store = store_of(tmp_path, limit_bytes=6 * size)
    store.prefetch(urls)
    settled(store)
    assert len(copies(tmp_path)) == 3 and list(store._kept) == urls[:3] and store.wait_seconds == 0
    names = copies(tmp_path)
    for number in range(3):
        assert store.read(urls[number], 0, 700) == tar_bytes(files(5, first=10 * number))[:700]
    assert copies(tmp_path) == names  # nothing was fetched again
    store.prefetch(urls[3:])
    settled(store)
    assert len(copies(tmp_path)) == 6


def test_a_failed_prefetch_is_logged_and_left_to_the_reader(tmp_path: Path, memory: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_megascale.data.storage")
    store = store_of(tmp_path, retries=0)
    store.prefetch([f"{memory}/none.tar", str(tmp_path / "local.tar"), f"{memory}/001.tar"])
    settled(store)
    assert "none.tar" in caplog.text and "fetched when it is needed" in caplog.text and len(copies(tmp_path)) == 1
    with pytest.raises(FileNotFoundError, match=r"none\.tar: there is no such file"):
        store.read(f"{memory}/none.tar", 0, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit_bytes": 0}, "limit_bytes=0: must be positive"),
        ({"retries": -1}, "retries=-1"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_impossible_options(tmp_path: Path, options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardStore(tmp_path, **options)


def test_a_cache_that_cannot_be_written(tmp_path: Path, memory: str) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="MEGASCALE_CACHE"):
        store_of(tmp_path).read(f"{memory}/000.tar", 0, 1)


def test_a_full_disk_is_no_reason_to_try_again(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(_: int) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache.os, "fsync", full)
    with pytest.raises(OSError, match="is full .* set limit_bytes"):
        store_of(tmp_path).read(f"{memory}/000.tar", 0, 1)
    assert len(calls) == 1 and copies(tmp_path) == []

"""Remote shards are fetched before a run reads them: in order, once, within the limit, and never to the run's harm."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_megascale.data import ahead, mixture, shard_cache, storage
from lightning_megascale.data.ahead import ReadAhead, read_ahead
from lightning_megascale.data.cache import lock
from lightning_megascale.data.mixture import MixtureDataModule
from lightning_megascale.data.mixture_stream import PackedStream
from lightning_megascale.data.storage import ShardStore
from tests.data.mixes import module, run, write
from tests.data.tars import files, tar_bytes

FORK = multiprocessing.get_context("fork")
MEMORY = type(fsspec.filesystem("memory"))
SIZES = {"a": (20,) * 8, "b": (15, 25, 10, 30)}  # samples of the shards
STAGES: list[dict[str, Any]] = [
    {"name": "one", "until": {"samples": 60}, "mix": {"b": 1}},
    {"name": "two", "until": {"samples": 180}, "mix": {"a": 0.75, "b": 0.25}},
]


class Log:
    """What happened to shards in all processes, in order: ("get" | "read" | "fail", shard, process)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def add(self, what: str, shard: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what} {shard.rsplit('/', 1)[-1]} {os.getpid()}\n")

    def events(self) -> list[tuple[str, str, int]]:
        return [(what, shard, int(process)) for what, shard, process in map(str.split, self.path.read_text().splitlines())]

    def shards(self, what: str) -> list[str]:
        return [shard for kind, shard, _ in self.events() if kind == what]

    def first_reads(self) -> list[str]:
        return list(dict.fromkeys(self.shards("read")))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Notes every transfer and every read."""
    made, get_file, read = Log(tmp_path / "log"), MEMORY.get_file, ShardStore.read

    def noted_get(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        made.add("get", path)
        return get_file(self, path, *arguments, **options)

    def noted_read(self: ShardStore, url: str, offset: int, size: int) -> bytes:
        made.add("read", url)
        return read(self, url, offset, size)

    monkeypatch.setattr(MEMORY, "get_file", noted_get)
    monkeypatch.setattr(ShardStore, "read", noted_read)
    return made


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ahead")
    return {name: write(folder, name, sizes) for name, sizes in SIZES.items()}


@pytest.fixture
def remote(urls: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same shards in a remote store."""
    system, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    for pattern in urls.values():
        for path in Path(pattern).parent.glob(Path(pattern).name):
            if path.suffix == ".tar":
                system.pipe(f"{folder}/{path.name}", path.read_bytes())
    yield {name: f"memory:/{folder}/{name}-*.tar" for name in urls}
    system.rm(folder, recursive=True)


@pytest.fixture
def fresh(tmp_path: Path, log: Log) -> Callable[..., MixtureDataModule]:
    """A module whose indexes are there and whose shards are not."""

    def make(sources: dict[str, str], **options: Any) -> MixtureDataModule:
        options = {"lanes": 1, "packing_window": 32, "stages": STAGES, **options}
        module(sources, tmp_path, **options).prepare_data()
        data = module(sources, tmp_path, **options)
        data.setup()
        data.store._files.clear()
        data.store.retries, data.store.backoff_seconds = 0, 0.0
        shutil.rmtree(data.cache_dir / "shards", ignore_errors=True)
        log.path.write_text("")
        return data

    return make


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for shards waits until the fetching thread has ended, so that nothing depends on who is faster."""
    prefetch = ShardStore.prefetch

    def waited(self: ShardStore, *arguments: Any) -> None:
        prefetch(self, *arguments)
        settled(self)

    monkeypatch.setattr(ShardStore, "prefetch", waited)


def settled(store: ShardStore) -> None:
    thread = store._thread
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def rows(data: MixtureDataModule) -> list[Any]:
    return [(batch["__key__"], batch["input_ids"].tolist()) for batch in data.train_dataloader()]


# ---- runs ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["padded", "packed", "bucketed"])
def test_shards_are_fetched_once_before_they_are_read_in_the_order_of_first_use(
    kind: str, urls: dict[str, str], remote: dict[str, str], fresh: Any, log: Log, patient: None
) -> None:
    wanted = rows(fresh(urls, rows=kind))
    data = fresh(remote, rows=kind)
    assert rows(data) == wanted and len(wanted) > 20
    events = [(what, shard) for what, shard, _ in log.events()]
    fetched = log.shards("get")
    assert len(fetched) == 12 and fetched == log.first_reads()
    assert all(events.index(("get", shard)) < events.index(("read", shard)) for shard in fetched)
    assert data.store._wanted == data.store._kept == {} and data.store._thread is None


def test_the_next_shards_are_on_their_way_long_before_the_border(remote: dict[str, str], fresh: Any, log: Log, patient: None) -> None:
    """The first batch is from one stage; at 256 samples ahead the next one's shards are already here."""
    batches = iter(fresh(remote).train_dataloader())
    next(batches)
    assert len(log.first_reads()) == 1 and len(log.shards("get")) == 12
    batches.close()


def test_a_rank_fetches_what_its_own_rows_need(remote: dict[str, str], fresh: Any, log: Log, patient: None) -> None:
    stages = [{"name": "a", "until": {"samples": 80}, "mix": {"a": 1}}]
    needed = []
    for rank in range(4):
        data = fresh(remote, stages=stages, lanes=4, shuffle_window=256, batch_size=1)
        for order in data.orders:
            order.lanes = 4  # else few rows turn them off
        run(data, rank, 4)
        assert log.shards("get") == log.first_reads()
        needed.append(set(log.shards("get")))
    assert all(len(shards) < 8 for shards in needed) and set.union(*needed) == {f"a-{n:03d}.tar" for n in range(8)}


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_workers_find_the_shards_in_the_cache(
    kind: str, urls: dict[str, str], remote: dict[str, str], fresh: Any, log: Log, patient: None
) -> None:
    wanted = rows(fresh(urls, rows=kind))
    assert rows(fresh(remote, rows=kind, num_workers=2)) == wanted
    gets = [(shard, process) for what, shard, process in log.events() if what == "get"]
    assert len(gets) == 12 and {process for _, process in gets} == {os.getpid()}
    readers = {process for what, _, process in log.events() if what == "read"}
    assert len(readers) == 2 and os.getpid() not in readers


def test_local_shards_start_nothing(urls: dict[str, str], fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fresh(urls, rows="packed", validation={"v": urls["a"]})
    plan = [[0]]
    for stream in (data.train_stream, PackedStream(data.train_stream, data.packer), data.validation_stream):
        assert read_ahead(plan, stream, data.store) is plan
    monkeypatch.setattr(ShardStore, "prefetch", lambda *_: pytest.fail("asked for shards"))
    rows(data)
    list(data.val_dataloader())
    assert "shard prefetch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_validation_reads_ahead(kind: str, urls: dict[str, str], remote: dict[str, str], fresh: Any, log: Log, patient: None) -> None:
    wanted = [batch["__key__"] for batch in fresh(urls, rows=kind, validation={"v": urls["a"]}).val_dataloader()]
    data = fresh(remote, rows=kind, validation={"v": remote["a"]})
    assert [batch["__key__"] for batch in data.val_dataloader()] == wanted
    events = [(what, shard) for what, shard, _ in log.events()]
    assert log.shards("get") == log.first_reads() and len(log.shards("get")) == 8
    assert all(events.index(("get", shard)) < events.index(("read", shard)) for shard in log.first_reads())


def test_a_resumed_run_fetches_from_its_position_on(remote: dict[str, str], fresh: Any, log: Log, patient: None) -> None:
    data = fresh(remote)
    data.load_state_dict({"position": 200, "batches": 0, "global_batch": 2, "data": data.identity})
    next(iter(data.train_dataloader()))
    assert log.shards("get")[0] == log.first_reads()[0] and log.first_reads()[0] == _shard_of(data, 200)


def _shard_of(data: MixtureDataModule, position: int) -> str:
    _, source, draw = data.schedule.at(position)
    return data.train_stream.sources[source].shards[data.orders[source].at(draw).shard]  # type: ignore[union-attr]


# ---- the limit -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "workers"), [(1, 0), (2, 0), (4, 0), (6, 0), (1, 2), (4, 2)])
def test_a_limit_of_few_shards_fetches_none_more_often_than_without(
    limit: int, workers: int, remote: dict[str, str], fresh: Any, log: Log, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "OPEN_FILES", 1)  # else all are open
    largest = max(len(data) for data in fsspec.filesystem("memory").cat(remote["a"].replace("a-*", "*")).values())
    counts, drawn = {}, {}
    for kind in ("without", "with"):
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore" if workers or limit < 4 else "error")  # it does not grow above the limit
            if kind == "without":
                patch.setattr(mixture, "read_ahead", lambda batches, *_: batches)
            data = fresh(remote, cache_gigabytes=limit * largest / 1e9, num_workers=workers, shuffle_window=8)
            shutil.rmtree(data.cache_dir / "shards", ignore_errors=True)
            drawn[kind] = rows(data)
        counts[kind] = len(log.shards("get"))
    assert drawn["with"] == drawn["without"]
    assert len(log.first_reads()) <= counts["with"] <= counts["without"], counts


def test_what_makes_too_little_room_is_not_removed_for_a_prefetch(tmp_path: Path, log: Log) -> None:
    system, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    names = [f"memory:/{folder}/{n}.tar" for n in range(5)]
    for number, name in enumerate(names):
        system.pipe(name, tar_bytes(files(5, first=10 * number)).ljust(20480 * (2 if number == 4 else 1), b"\0"))
    store = ShardStore(tmp_path / "cache", 4 * 20480, 0)
    open_ones = [store.local(name) for name in names[:3]]
    other = ShardStore(tmp_path / "cache", 4 * 20480, 0)
    closed = other.local(names[3])
    del other
    store.prefetch([names[4]])  # two shards' size, and one can go
    settled(store)
    assert closed.exists() and len(log.shards("get")) == 4
    del store._files[names[2]]  # now two can
    store.prefetch([names[4]])
    settled(store)
    assert log.shards("get")[-1] == "4.tar" and [path.exists() for path in [*open_ones, closed]] == [True, True, False, False]


def test_what_is_needed_next_stays_until_the_plan_has_passed_it(tmp_path: Path, log: Log) -> None:
    system, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    names = [f"memory:/{folder}/{n}.tar" for n in range(6)]
    for number, name in enumerate(names):
        system.pipe(name, tar_bytes(files(5, first=10 * number)))
    size = len(tar_bytes(files(5)))
    store, reader = ShardStore(tmp_path / "cache", 4 * size, 0), ShardStore(tmp_path / "cache", 4 * size, 0)
    store.prefetch(names[:3])
    settled(store)
    assert log.shards("get") == ["0.tar", "1.tar"]  # half of the limit
    for name in names[3:]:
        reader.read(name, 0, 1)
        reader._files.clear()
    assert sorted(path.stat().st_size for path in (tmp_path / "cache" / "shards").iterdir()) == [size] * 4
    before = len(log.shards("get"))
    for name in names[:2]:
        reader.read(name, 0, 1)
        reader._files.clear()
    assert len(log.shards("get")) == before  # they stayed
    store.prefetch(names[1:3])  # the plan has passed shard 0
    settled(store)
    assert list(store._kept) == names[1:3] and log.shards("get")[-1] == "2.tar"


# ---- what fails ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("for_good", [True, False])
def test_a_shard_that_cannot_be_fetched_ahead_stops_nothing_until_it_is_read(
    for_good: bool, remote: dict[str, str], fresh: Any, log: Log, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, get_file = fresh(remote), MEMORY.get_file
    wanted = [data.train_stream.key(position) for position in range(240)]  # type: ignore[union-attr]
    first_bad = next(position for position in range(240) if _shard_of(data, position) == "a-003.tar")

    def failing(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith("a-003.tar") and (for_good or "a-003.tar" not in log.shards("fail")):
            log.add("fail", path)
            raise [OSError("no route"), RuntimeError("odd")][not for_good]
        return get_file(self, path, *arguments, **options)

    monkeypatch.setattr(MEMORY, "get_file", failing)
    found: list[str] = []
    batches = iter(data.train_dataloader())
    if not for_good:
        found = [key for batch in batches for row in batch["__key__"] for key in row]
        assert found == wanted and log.shards("fail") == ["a-003.tar"]
        events = [(what, shard) for what, shard, _ in log.events()]
        late = [shard for shard in log.first_reads() if events.index(("get", shard)) > events.index(("read", shard))]
        assert late == ["a-003.tar"] and data.store._thread is None  # the next ones were fetched ahead as before
        return
    with pytest.raises(OSError, match=r"fetching memory://.*a-003.tar: attempt 1 of 1 failed: no route"):
        for batch in batches:
            found += [key for row in batch["__key__"] for key in row]
    assert found == wanted[: first_bad - first_bad % 2] and first_bad > 60
    assert log.shards("fail") == ["a-003.tar"] * 2  # once ahead, once for the reader
    assert len(log.shards("get")) == 11


def test_a_shard_that_another_process_fetches_is_left_to_it(tmp_path: Path, log: Log) -> None:
    system, folder = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    names = [f"memory:/{folder}/{n}.tar" for n in range(2)]
    for name in names:
        system.pipe(name, tar_bytes(files(5)))
    store = ShardStore(tmp_path / "cache", None, 0)
    store.local(names[0]).unlink()  # leaves its lock's file
    store._files.clear()
    (place,) = (tmp_path / "cache" / "locks").glob("shard-*")
    with lock(place, 1):
        store.prefetch(names)
        settled(store)
        assert log.shards("get") == ["0.tar", "1.tar"]
    store.prefetch(names)
    settled(store)
    assert log.shards("get") == ["0.tar", "1.tar", "0.tar"]


def _idle(pipe: Any) -> None:
    pipe.recv()


def test_a_process_forked_during_a_transfer_holds_no_lock_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, name, get_file = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}/0.tar", MEMORY.get_file
    system.pipe(name, tar_bytes(files(5)))
    started, go = threading.Event(), threading.Event()

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        started.set()
        assert go.wait(30)
        return get_file(self, *arguments, **options)

    monkeypatch.setattr(MEMORY, "get_file", slow)
    store, (here, there) = ShardStore(tmp_path / "cache", 1 << 20, 0), FORK.Pipe()
    store.prefetch([name])
    assert started.wait(30)
    process = FORK.Process(target=_idle, args=(there,))
    process.start()
    try:
        go.set()
        settled(store)
        (copy,) = (tmp_path / "cache" / "shards").iterdir()
        for place in (tmp_path / "cache" / "locks").iterdir():
            with lock(place, 0.0) as locked:
                assert locked
        assert shard_cache._claim(copy) is None  # this process keeps it
        store.prefetch([])
        claim = shard_cache._claim(copy)
        assert claim is not None
        os.close(claim)
    finally:
        here.send("end")
        process.join(20)


def test_an_interpreter_ends_during_a_transfer(tmp_path: Path) -> None:
    program = f"""
import threading, fsspec
from lightning_megascale.data.storage import ShardStore
system, started = fsspec.filesystem("memory"), threading.Event()
system.pipe("memory://x/0.tar", b"0" * 1024)
type(system).get_file = lambda *_, **__: (started.set(), threading.Event().wait())
store = ShardStore({str(tmp_path / "cache")!r})
store.prefetch(["memory://x/0.tar"])
assert started.wait(60)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90, cwd=Path(__file__).parents[2])


def test_a_loader_that_is_left_early_wants_nothing_more(remote: dict[str, str], fresh: Any, patient: None) -> None:
    data = fresh(remote, num_workers=1, cache_gigabytes=1.0)
    batches = iter(data.train_dataloader())
    next(batches)
    assert len(data.store._wanted) == 1 and data.store._kept
    batches.close()
    assert data.store._wanted == data.store._kept == {} and data.store._thread is None


# ---- the window ------------------------------------------------------------------------------------------------------------------------


class Asked:
    """A store that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def prefetch(self, urls: list[str], owner: object = None) -> None:
        self.calls.append(urls)


@pytest.mark.parametrize("outstanding", [0, 3])
def test_the_window_has_the_samples_it_is_given_and_passed_shards_leave_it(outstanding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 batches of 2 rows of 3 samples, 4 batches on a shard; 30 samples are 5 batches."""
    monkeypatch.setattr(ahead, "_FIRST", 30)
    store, taken = Asked(), []

    def plan() -> Iterator[list[int]]:
        for batch in range(20):
            taken.append(batch)
            yield [2 * batch, 2 * batch + 1]

    reading = ReadAhead(plan(), lambda row: (3, [f"s{row // 8}", f"s{row // 8}"]), store, outstanding, samples=30)  # type: ignore[arg-type]
    assert taken == [] and store.calls == []
    for number, batch in enumerate(reading):
        assert batch == [2 * number, 2 * number + 1] and len(taken) == min(number + 5, 20)
        first, last = max(number - outstanding, 0), min(number + 4, 19)
        assert store.calls[-1] == [f"s{shard}" for shard in range(first // 4, last // 4 + 1)]
    changes = len(store.calls)
    assert changes <= 10  # asked for when something changed only
    reading.close()
    assert store.calls[changes:] == [[]] and list(reading) == []


def test_the_window_grows_in_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_FIRST", 2)
    taken: list[int] = []

    def plan() -> Iterator[list[int]]:
        for batch in range(100):
            taken.append(batch)
            yield [batch]

    reading = ReadAhead(plan(), lambda row: (1, []), Asked(), samples=12)  # type: ignore[arg-type]
    counts = [len(taken) - number for number, _ in enumerate(reading) if number < 6]
    assert counts == [2, 6, 10, 12, 12, 12] and len(taken) == 100

"""build_once: one builder, atomic, verified; what is broken is built again, who waits says for whom."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from lightning_megascale.data.cache import MANIFEST, build_once, defect
from tests.harness import run_ranks


def write(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "a.txt").write_text("alpha")
    (folder / "b.txt").write_text("beta")


def build_and_count(folder: str, log: str) -> str:
    import time

    def slowly(place: Path) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)  # so that the others find it unfinished
        write(place)

    return (build_once(Path(folder), slowly) / "b.txt").read_text()


def test_ranks_that_start_at_once_build_once(tmp_path: Path) -> None:
    results = run_ranks(build_and_count, 3, str(tmp_path / "x"), str(tmp_path / "log"), timeout=30)
    assert results == ["beta"] * 3
    assert len((tmp_path / "log").read_text().split()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.lock", "log"}


def test_a_good_folder_is_left_alone(tmp_path: Path) -> None:
    build_once(tmp_path / "x", write)
    build_once(tmp_path / "x", lambda folder: pytest.fail("built again"))
    assert defect(tmp_path / "x") is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "b.txt").unlink(), "b.txt cannot be read"),
        (lambda folder: (folder / "b.txt").write_text("bet"), "3 bytes, 4 expected"),
        (lambda folder: (folder / "inner" / "a.txt").write_text("alphA"), "or other content"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:30]), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json cannot be read"),
    ],
)
def test_damage_is_found_and_repaired(tmp_path: Path, damage, words: str) -> None:
    folder = build_once(tmp_path / "x", write)
    damage(folder)
    assert words in (defect(folder) or "")
    build_once(folder, write)
    assert defect(folder) is None
    assert (folder / "b.txt").read_text() == "beta"
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.lock"}


def test_a_builder_that_dies_leaves_nothing_that_counts(tmp_path: Path) -> None:
    def dies(folder: Path) -> None:
        write(folder)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "x", dies)
    assert not (tmp_path / "x").exists()
    (tmp_path / "x.1-dead-new.tmp").mkdir()  # of a builder that was killed
    build_once(tmp_path / "x", write)
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.lock"}


def test_waiting_ends_and_names_the_holder(tmp_path: Path) -> None:
    with (tmp_path / "x.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on elsewhere\n")
        file.flush()
        with pytest.raises(TimeoutError, match=r"waited 0.2 s for .*x\.lock; it is held by process 7 on elsewhere"):
            build_once(tmp_path / "x", write, timeout_seconds=0.2)
    build_once(tmp_path / "x", write, timeout_seconds=0.2)
    assert f"process {os.getpid()} on" in (tmp_path / "x.lock").read_text()


def test_without_locks_the_first_to_rename_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def second(folder: Path) -> None:
        write(folder)
        if not (tmp_path / "x").exists():
            build_once(tmp_path / "x", write)  # another process finishes meanwhile
            os.utime(tmp_path / "x" / "b.txt", (1, 1))

    build_once(tmp_path / "x", second)
    assert (tmp_path / "x" / "b.txt").stat().st_mtime == 1  # the winner's file stayed
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x.lock"}
    assert set(json.loads((tmp_path / "x" / MANIFEST).read_text())["files"]) == {"b.txt", "inner/a.txt"}


def test_a_place_that_cannot_be_written_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(ValueError, match="cache_dir=.* cannot be written .*set MEGASCALE_CACHE"):
        build_once(tmp_path / "deep" / "x", write)


def test_a_place_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="cannot be written .*: set MEGASCALE_CACHE or cache_dir to a folder that can"):
            build_once(parent / "text", lambda folder: None)

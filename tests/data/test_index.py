"""The index of a shard: exact counts and bytes, every kind of damage refused, files built once, atomically and whole."""

from __future__ import annotations

import gzip
import hashlib
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from lightning_megascale.data import index as index_module
from lightning_megascale.data import shard_index
from lightning_megascale.data.index import ShardError, ShardIndex, build_index, column, index_path, open_index
from lightning_megascale.data.picture_size import picture_size
from lightning_megascale.data.tar_walk import TAIL_LIMIT
from tests.data.tars import BLOCK, END, files, header, header_offsets, member, png, tar_bytes, write_tar

FORK = multiprocessing.get_context("fork")


def of(data: bytes, **options: object) -> ShardIndex:
    return build_index(io.BytesIO(data), name="x.tar", **options)


def refused(data: bytes, **options: object) -> ShardError:
    with pytest.raises(ShardError, match=r"^x\.tar: at byte") as caught:
        of(data, **options)
    assert caught.value.shard == "x.tar"
    return caught.value


def content(index: ShardIndex, data: bytes) -> list[tuple[str, dict[str, bytes]]]:
    rows = []
    for row in range(len(index)):
        spans = {field: index.span(row, field) for field in index.fields}
        rows.append((index.key(row), {field: data[span[0] : sum(span)] for field, span in spans.items() if span is not None}))
    return rows


def by_webdataset(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    samples = wds.WebDataset(str(path), shardshuffle=False, empty_check=False)
    return [(s["__key__"], {key: value for key, value in s.items() if not key.startswith("__")}) for s in samples]


# What is read


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_byte_is_found_as_webdataset_finds_it(tmp_path: Path, format: int) -> None:
    path = tmp_path / "x.tar"
    extra = [
        ("deep/er.dir/a.seg.PNG", png(1, 1)),
        ("deep/er.dir/a.json", b"{}"),
        ("./b.txt", b""),
        ("b", b"no field"),
        ("__x__/c.txt", b"-"),
    ]
    path.write_bytes(tar_bytes(files(5) + extra, format, mtime=12.75))
    index = build_index(path)
    assert content(index, path.read_bytes()) == by_webdataset(path)
    assert len(index) == 7 and index.fields == ("json", "png", "seg.png", "txt")
    assert index.key(5) == "deep/er.dir/a" and index.shard_bytes == path.stat().st_size
    assert index.noted == 1 and "'b' belongs to no sample" in index.notes[0]


def test_the_writer_of_webdataset_with_its_pax_header_for_every_member(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with wds.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "json": {"a": number}, "png": png(2, 2)})
    with path.open("rb") as file:
        assert file.read(BLOCK)[156:157] == b"x"
    index = build_index(path)
    assert len(index) == 20 and content(index, path.read_bytes()) == by_webdataset(path)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("length", [99, 100, 101, 255, 256, 1000, 4090])
def test_long_names(format: int, length: int) -> None:
    name = "k" * (length - 4) + ".txt"
    assert of(tar_bytes([(name, b"long"), ("z.txt", b"short")], format)).key(0) == name[:-4]


def test_ustar_prefix_and_names_in_other_alphabets() -> None:
    prefix = "/".join(["d" * 30] * 4)
    data = tar_bytes([(f"{prefix}/a.txt", b"1"), ("ключ-鍵.txt", b"2")])
    assert [of(data).key(row) for row in range(2)] == [f"{prefix}/a", "ключ-鍵"]


def test_a_pax_size_and_global_header_and_base_256_numbers() -> None:
    records = b"10 size=5\n"
    big = bytes([0x80]) + (3).to_bytes(11, "big")
    data = member(b"g", b"19 comment=a commit", b"g")[:BLOCK] + b"20 comment=a commit\n".ljust(BLOCK, b"\0")
    data = header(b"g", 20, b"g") + b"20 comment=a commit\n".ljust(BLOCK, b"\0")
    data += member(b"x", records, b"x") + header(b"a.txt", 0) + b"12345".ljust(BLOCK, b"\0")
    data += header(b"b.txt", big) + b"678".ljust(BLOCK, b"\0") + END
    index = of(data)
    assert content(index, data) == [("a", {"txt": b"12345"}), ("b", {"txt": b"678"})]


def test_old_headers_signed_checksums_and_gnu_fields_are_read() -> None:
    old = header("é.txt".encode(), 1, b"\0", b"")
    assert content(of(old + b"1".ljust(BLOCK, b"\0") + END), old + b"1")[0][0] == "é"
    signed = sum(byte - 256 if byte > 127 else byte for byte in old[:148] + old[156:]) + 256
    old = old[:148] + b"%06o\0 " % signed + old[156:]
    assert of(old + bytes(BLOCK) + END).key(0) == "é"
    block = bytearray(header(b"a.txt", 0, magic=b"ustar  \0"))  # old GNU: times lie where POSIX has the prefix
    block[345:357] = b"14000000000\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert of(bytes(block) + END).key(0) == "a"


def test_checksums_sizes_and_pictures() -> None:
    data = tar_bytes(files(4) + [("e.txt", b"only text")])
    index = of(data)
    for row, (_, fields) in enumerate(content(index, data)):
        for field, value in fields.items():
            assert index.crc32(row, field) == zlib.crc32(value)
    assert [index.image_size(row) for row in range(5)] == [(2, 3), (3, 4), (4, 5), (2, 6), None]
    assert index.sizes("png")[4] == -1 and index.offsets("png")[4] == -1 and index.sizes("txt").tolist() == [9, 9, 9, 9, 9]
    assert index.span(4, "png") is None and index.field(4, "PNG; txt") == "txt" and index.span(4, "jpg;txt") == index.span(4, "txt")
    assert index.crc32(4, "png") is None and index.span(0, "never") is None
    for row in (-1, 5):
        with pytest.raises(IndexError, match="5 samples"):
            index.span(row, "txt")


def test_headers_only() -> None:
    data = tar_bytes(files(4))
    quick, full = of(data, crc=False), of(data)
    assert content(quick, data) == content(full, data)
    assert quick.crc32(0, "txt") is None and quick.image_size(0) is None and not quick.has_crc


def test_a_stream_that_cannot_seek_and_progress() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise AssertionError

    data, done = tar_bytes(files(9)), []
    for crc in (True, False):
        index = build_index(Pipe(data), name="p", crc=crc, progress=done.append)
        assert content(index, data) == content(of(data), data) and index.shard_bytes == len(data)
    assert done == sorted(done[: len(done) // 2]) * 2 and done[-1] == len(data) - len(data[done[-1] :])
    with pytest.raises(ShardError, match="truncated"):
        build_index(Pipe(data[: header_offsets(data)[5] + 600]), name="p", crc=False)


def test_the_size_of_jpegs_is_that_of_pillow() -> None:
    from PIL import Image

    for number, (width, height) in enumerate([(1, 1), (17, 300), (640, 480)]):
        for options in ({}, {"progressive": True}, {"exif": b"Exif\0\0" + bytes(30_000)}):
            buffer = io.BytesIO()
            Image.new("L" if number == 1 else "RGB", (width, height)).save(buffer, "JPEG", **options)
            assert picture_size(buffer.getvalue()) == (height, width)
    assert picture_size(b"\xff\xd8\xff\xe0\0\0") == picture_size(b"") == picture_size(b"GIF89a") == (0, 0)


def test_links_devices_and_odd_names_are_listed_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = b"".join(header(b"%c.txt" % (97 + n), 7, b"%d" % n) for n in range(1, 7))
    data += member(b"../../etc/evil.txt", b"1") + member(b"/abs.txt", b"2") + member(b"v", b"xyz", b"V") + member(b"d/", b"", b"\0")
    data += member(b"bell\x07.txt", b"3") + END
    index = of(data)
    assert [index.key(row) for row in range(3)] == ["../../etc/evil", "/abs", "bell\x07"]
    assert content(index, data)[0][1] == {"txt": b"1"}
    text = "\n".join(index.notes)
    for part in ("'b.txt' is a hard link", "'c.txt' is a symbolic link", "a device", "a pipe", "'../../etc/evil.txt' has", "type b'V'"):
        assert part in text
    assert index.noted == 9 and list(tmp_path.iterdir()) == []


def test_notes_are_counted_but_not_all_kept() -> None:
    index = of(tar_bytes([(f"no-field-{n}", b"") for n in range(150)] + files(1)))
    assert index.noted == 150 and len(index.notes) == 100


# What is refused


def test_a_zeroed_header_is_no_end() -> None:
    data = tar_bytes(files(10))
    for number, offset in enumerate(header_offsets(data)):
        error = refused(data[:offset] + bytes(BLOCK) + data[offset + BLOCK :])
        assert error.offset == offset and error.samples == (number + 1) // 2 and "data follows" in str(error)


def test_a_wiped_or_missing_rest_filled_with_zeros_is_no_end() -> None:
    data = tar_bytes([(f"{n}.txt", bytes(3000) if n else b"x") for n in range(20)])
    offset = header_offsets(data)[10]
    assert "or never arrived" in str(refused(data[:offset] + bytes(len(data) - offset)))
    least = member(b"a.txt", b"x")
    assert len(of(least + bytes(TAIL_LIMIT))) == 1
    assert "or never arrived" in str(refused(least + bytes(TAIL_LIMIT + 1)))


def test_every_flipped_byte_of_a_header_is_refused() -> None:
    data = tar_bytes(files(3), tarfile.PAX_FORMAT, mtime=1.5)
    assert len(of(data)) == 3
    offset = header_offsets(data)[2]
    kinds = set()
    for start in (offset, offset + 2 * BLOCK):  # the pax header, and the member's
        kinds.add(data[start + 156 : start + 157])
        for at in range(start, start + BLOCK):
            if at - start == 155:  # after the NUL that ends the checksum: no part of any value
                continue
            for mask in (0x01, 0x80, 0xFF):
                error = refused(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
                assert error.offset in (start, offset), error
    assert kinds == {b"x", b"0"}


def test_a_flipped_byte_in_the_data_changes_the_checksum_and_the_hash() -> None:
    data = tar_bytes(files(3))
    index = of(data)
    offset, size = index.span(1, "txt")
    other = of(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :])
    assert [row for row in range(3) if other.crc32(row, "txt") != index.crc32(row, "txt")] == [1]
    assert other.content_hash != index.content_hash


def test_a_cut_at_every_place_is_refused_and_says_after_how_many_samples() -> None:
    data = tar_bytes(files(4))
    offsets = header_offsets(data)
    end = offsets[-1] + 2 * BLOCK
    for cut in sorted({*range(0, end, 100), *offsets, end, *(offset + BLOCK for offset in offsets), end + BLOCK - 1}):
        error = refused(data[:cut])
        text = "is empty" if not cut else "between two members" if cut in (*offsets, end) else "truncated"
        assert text in str(error), cut
        assert error.samples <= sum(offset < cut for offset in offsets[::2])
        if cut > 512 and cut not in (*offsets, end, *(offset + BLOCK for offset in offsets)):
            assert str(refused(data[:cut], crc=False)) == str(error)
    assert refused(data[: offsets[4]]).samples == 2
    assert len(of(data[: end + BLOCK])) == 4  # one block of zeros is an end


def test_random_damage_never_loses_samples_silently() -> None:
    generator, data = random.Random(0), tar_bytes(files(6), tarfile.PAX_FORMAT, mtime=0.5)
    keys, last = [key for key, _ in content(of(data), data)], header_offsets(data)[-1]
    outcomes = {"refused": 0, "whole": 0}
    for _ in range(600):
        length = generator.choice([1, 7, BLOCK, 2 * BLOCK, 5000])
        start = generator.randrange(last - length)  # zeros over the last sample make the tar of the others, byte for byte
        filler = generator.choice([bytes(length), generator.randbytes(length)])
        try:
            index = of(data[:start] + filler + data[start + length :])
        except ShardError:
            outcomes["refused"] += 1
        else:
            assert len(index) == len(keys)  # a name in a pax header may change, a count never
            outcomes["whole"] += 1
    assert min(outcomes.values()) > 50, outcomes


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        (member(b"a.txt", b"2"), "duplicate: sample 'a' has the field 'txt' twice"),
        (member(b"a.TXT", b"2"), "has the field 'txt' twice"),
        (member(b"b.txt", b"2") + member(b"a.png", b"3"), "duplicate key 'a'"),
        (member(b"\xe9t\xe9.txt", b"2"), "is not UTF-8"),
        (member(b"L", b"n" * 5000 + b"\0", b"L") + member(b"n", b"", b"0"), "exceeds the limit of 4,096"),
        (header(b"x", 2 << 20, b"x"), "exceeds the limit of 1,048,576"),
        (member(b"x", b"99 size=3\n", b"x"), "the pax header cannot be read"),
        (member(b"x", b"10 size:5\n", b"x"), "the pax header cannot be read"),
        (member(b"x", b"-1 size=5\n", b"x"), "the pax header cannot be read"),
        (member(b"x", b"11 size=-5\n", b"x") + header(b"b.txt", 0), "is no number"),
        (member(b"x", b"30 GNU.sparse.realsize=999999\n", b"x") + member(b"b.txt", b"2"), "sparse"),
        (member(b"b.txt", b"2", b"S"), "sparse"),
        (member(b"b.txt", b"2", b"M"), "another volume"),
        (member(b"x", b"12 path=abc\n", b"x"), "without the member it describes"),
        (header(b"b.txt", b"-0000000001\0"), "is no number"),
        (header(b"b.txt", b"00000000009\0"), "is no number"),
        (header(b"b.txt", b"\xff" * 12), "is no number"),
        (header(b"b.txt", 1 << 20), "truncated: 'b.txt' needs 1,048,576 bytes, and 1,024 are left"),
        (header(b"b.txt", 1 << 31), "size_limit=1,073,741,824"),
        (header(b"b.txt", b"\x80" + b"\x7f" * 11), "size_limit"),
    ],
)
def test_what_is_refused_with_its_place(tail: bytes, text: str) -> None:
    error = refused(member(b"a.txt", b"1") + tail + END)
    assert text in str(error) and error.offset >= 2 * BLOCK and error.samples in (1, 2)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (END, "no samples"),
        (bytes(20 * BLOCK), "no samples"),
        (member(b"README", b"hello") + member(b".hidden", b"") + member(b"dot.", b"") + END, "no samples"),
        (gzip.compress(tar_bytes(files(1))), "compressed with gzip"),
        (b"<html>404</html>" * 100, "no tar file"),
        (b"short", "truncated"),
        (tar_bytes(files(1)) * 2, "tars were concatenated"),
        (tar_bytes([(f"sample.{n}.jpg", b"") for n in range(300)]), "keys must not contain dots"),
    ],
)
def test_files_without_samples(data: bytes, text: str) -> None:
    assert text in str(refused(data))


def test_a_huge_member_far_behind_four_gigabytes(tmp_path: Path) -> None:
    path, size = tmp_path / "x.tar", 9 << 30
    with path.open("wb") as file:  # a file with a hole takes no room
        file.write(header(b"a.bin", bytes([0x80]) + size.to_bytes(11, "big")))
        file.seek(size, 1)
        file.write(member(b"b.txt", b"behind") + END)
    with pytest.raises(ShardError, match=r"'a\.bin' has 9,663,676,416 bytes and exceeds size_limit"):
        build_index(path, crc=False)
    index = open_index(path, tmp_path / "cache", crc=False, size_limit=size)
    assert index.span(0, "bin") == (BLOCK, size) and index.span(1, "txt") == (size + 2 * BLOCK, 6)
    with pytest.raises(ShardError, match="exceeds size_limit"):
        open_index(path, tmp_path / "cache", crc=False)


def test_the_error_crosses_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(refused(b"")))
    assert isinstance(error, ShardError) and error.shard == "x.tar" and "empty" in str(error)


# The file


def test_open_builds_once_beside_the_shard_and_maps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "x.tar", 50)
    first = open_index(path, tmp_path / "cache")
    assert first.path == index_path(path, tmp_path / "cache") == tmp_path / "x.tar.idx"
    monkeypatch.setattr(index_module, "build_index", lambda *_, **__: pytest.fail("built again"))
    again = open_index(path, tmp_path / "cache")
    built = build_index(path)
    assert content(again, path.read_bytes()) == content(built, path.read_bytes())
    assert again.content_hash == built.content_hash and again.fields == built.fields and again.is_intact()
    assert {name: again.image_size(name) for name in range(50)} == {name: built.image_size(name) for name in range(50)}
    assert content(pickle.loads(pickle.dumps(again)), path.read_bytes()) == content(built, path.read_bytes())
    assert len(pickle.dumps(again)) < 2000 and sorted(os.listdir(tmp_path)) == ["cache", "x.tar", "x.tar.idx"]
    with pytest.raises(FileNotFoundError):
        open_index(tmp_path / "y.tar", tmp_path / "cache")


def test_a_changed_shard_is_indexed_again_and_an_unchanged_copy_has_the_same_hash(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 5)
    old = open_index(path, tmp_path / "cache")
    write_tar(path, 5, first=5)  # of the same size
    os.utime(path, ns=(0, 12345))
    new = open_index(path, tmp_path / "cache")
    assert new.key(0) == "000005" and new.content_hash != old.content_hash
    with pytest.raises(ShardError, match="start again"):
        old.key(0)  # was not mapped yet, and its file is another's
    assert new.key(0) == "000005"
    write_tar(path, 5, first=90)
    os.utime(path, ns=(0, 77))
    assert open_index(path, tmp_path / "cache").key(0) == "000090"
    assert new.key(4) == "000009"  # the old file is whole while somebody maps it: it was replaced, not overwritten
    new = open_index(path, tmp_path / "cache")
    copy = Path(shutil.copy(path, tmp_path / "copy.tar"))
    assert open_index(copy, tmp_path / "cache").content_hash == new.content_hash


def test_a_shard_that_lost_samples_since_it_was_indexed_warns(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 3)
    open_index(path, tmp_path)
    data = path.read_bytes()
    start = header_offsets(data)[4]
    path.write_bytes(data[:start] + bytes(len(data) - start))  # now the tar of two samples
    os.utime(path, ns=(0, 5))
    with pytest.warns(UserWarning, match=r"had 3 samples when it was indexed before, and has 2 now"):
        assert open_index(path, tmp_path).samples == 2


def test_without_build(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 5)
    with pytest.raises(ValueError, match="megascale data index"):
        open_index(path, tmp_path, build=False)
    open_index(path, tmp_path, crc=False)
    assert open_index(path, tmp_path, crc=False, build=False).samples == 5
    with pytest.raises(ValueError, match="no current index"):  # one without checksums does not do
        open_index(path, tmp_path, build=False)
    assert open_index(path, tmp_path).has_crc and open_index(path, tmp_path, crc=False).has_crc


def test_a_broken_index_file_is_built_again(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 30)
    place = open_index(path, tmp_path).path
    good = place.read_bytes()
    for bad in (b"", good[:10], good[:-1], good + b"x", b"LMSCOL99" + good[8:], good[:40] + b"\xff" + good[41:], bytes(len(good))):
        place.write_bytes(bad)
        assert content(open_index(path, tmp_path), path.read_bytes()) == content(build_index(path), path.read_bytes())
        assert place.read_bytes() == good
    place.write_bytes(good[:-64] + b"\xff" * 64)
    assert not open_index(path, tmp_path).is_intact()


def test_a_shard_that_grows_while_it_is_indexed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 5)

    def grow(_: int) -> None:
        os.utime(path, ns=(0, time.time_ns()))

    with pytest.raises(ShardError, match="changed while it was indexed"):
        build_index(path, progress=grow)


def _open_slowly(path: Path, folder: Path, results: object) -> None:
    build = index_module.build_index

    def slow(*arguments: object, **options: object) -> ShardIndex:
        with (folder / "log").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return build(*arguments, **options)

    index_module.build_index = slow
    index = open_index(path, folder / "cache")
    results.put((index.samples, index.key(49), index.content_hash))


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    path, results = write_tar(tmp_path / "x.tar", 50), FORK.Queue()
    processes = [FORK.Process(target=_open_slowly, args=(path, tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join(30)
    assert found == {(50, "000049", build_index(path).content_hash)}
    assert len((tmp_path / "log").read_text().split()) == 1
    assert {name for name in os.listdir(tmp_path) if name.startswith("x.tar")} == {"x.tar", "x.tar.idx"}


def test_without_locks_all_build_and_readers_see_only_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path, results = write_tar(tmp_path / "x.tar", 50), FORK.Queue()
    processes = [FORK.Process(target=_open_slowly, args=(path, tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=30) for _ in processes}) == 1
    for process in processes:
        process.join(30)
    assert len((tmp_path / "log").read_text().split()) == 3


def _die_while_writing(path: Path, cache: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # after the bytes, before the rename
    open_index(path, cache)


def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", 20)
    process = FORK.Process(target=_die_while_writing, args=(path, tmp_path / "cache"))
    process.start()
    process.join(30)
    leftovers = list(tmp_path.glob("x.tar.idx.*.tmp"))
    assert process.exitcode == -signal.SIGKILL and len(leftovers) == 1 and not (tmp_path / "x.tar.idx").exists()
    assert open_index(path, tmp_path / "cache").samples == 20  # the lock went with the process
    os.utime(leftovers[0], (0, 0))
    os.unlink(tmp_path / "x.tar.idx")
    open_index(path, tmp_path / "cache")
    assert list(tmp_path.glob("x.tar.idx*")) == [tmp_path / "x.tar.idx"]


def _as_nobody(folder: Path, results: object) -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    index = open_index(folder / "data" / "x.tar", folder / "cache")
    lengths = column(index, "length", "v1", lambda row: row, cache_dir=folder / "cache")
    results.put((str(index.path), index.key(4), lengths.tolist(), str(index_path(folder / "data" / "x.tar", folder / "cache"))))
    for place in (folder / "data" / "x.tar", folder / "data" / "y.tar"):
        try:
            open_index(place, folder / "data" / "cache")
            results.put("opened")
        except ValueError as error:
            results.put(str(error))


def test_a_read_only_folder_has_its_index_in_the_cache() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "data").mkdir()
        (folder / "cache").mkdir()
        write_tar(folder / "data" / "x.tar", 5)
        write_tar(folder / "data" / "y.tar", 5)
        for place, mode in ((folder, 0o755), (folder / "cache", 0o777), (folder / "data", 0o555)):
            place.chmod(mode)
        results = FORK.Queue()
        process = FORK.Process(target=_as_nobody, args=(folder, results))
        process.start()
        path, key, lengths, expected = results.get(timeout=30)
        messages = [results.get(timeout=30) for _ in range(2)]
        process.join(30)
        assert Path(path).parent == folder / "cache" / "index" and path == expected and key == "000004" and lengths == [0, 1, 2, 3, 4]
        assert os.listdir(folder / "data") == ["x.tar", "y.tar"] or sorted(os.listdir(folder / "data")) == ["x.tar", "y.tar"]
        for message in messages:
            assert "can be written" in message and "MEGASCALE_CACHE" in message
    finally:
        (folder / "data").chmod(0o755)
        shutil.rmtree(folder)


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "_OPEN_LIMIT", 8)
    indexes = [open_index(write_tar(tmp_path / f"{n}.tar", 2, first=n), tmp_path) for n in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert [index.key(1) for index in indexes] == [f"{n + 1:06d}" for n in range(40)]
        assert len(os.listdir("/proc/self/fd")) <= before + 9


# Columns


def test_a_column_is_computed_once_for_each_identity(tmp_path: Path) -> None:
    path, calls = write_tar(tmp_path / "x.tar", 6), []

    def compute(row: int) -> int:
        calls.append(row)
        return row * row - 3

    for _ in range(3):
        values = column(path, "tokens", "tokenizer A", compute, cache_dir=tmp_path / "cache")
        assert values.dtype == np.int32 and values.tolist() == [-3, -2, 1, 6, 13, 22]
    assert calls == list(range(6))
    assert column(open_index(path, tmp_path), "tokens", "tokenizer B", lambda row: 7, cache_dir=tmp_path / "cache").tolist() == [7] * 6
    assert column(path, "tokens", "tokenizer A", compute, cache_dir=tmp_path / "cache").tolist()[5] == 22 and len(calls) == 6
    tag = hashlib.sha256(b"tokenizer A").hexdigest()[:16]
    assert (tmp_path / f"x.tar.idx.tokens-{tag}").exists()
    write_tar(path, 6, first=1)
    os.utime(path, ns=(0, 5))
    assert column(path, "tokens", "tokenizer A", lambda row: 1, cache_dir=tmp_path / "cache").tolist() == [1] * 6
    with pytest.raises(ValueError, match=r"column 'tokens': 2147483648 does not fit into int32"):
        column(path, "tokens", "C", lambda row: 1 << 31, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="lower-case letters"):
        column(path, "../x", "C", lambda row: 1)


def test_a_column_of_an_index_in_memory_goes_to_the_cache(tmp_path: Path) -> None:
    index = of(tar_bytes(files(3)))
    assert column(index, "n", "a", lambda row: row, cache_dir=tmp_path).tolist() == [0, 1, 2]
    assert column(index, "n", "a", lambda row: pytest.fail("again"), cache_dir=tmp_path).tolist() == [0, 1, 2]

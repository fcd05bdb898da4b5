"""Walks the headers of a tar file and trusts none of them: damage is an error, never a shorter shard, and nothing is written by name.

A tar has no table of contents: a reader follows headers until it meets a block of zeros. So a wiped header reads like the end, and
a file cut between two members like a shorter one. This walk therefore wants every checksum right, zeros from the end marker to the
last byte, and no more of them than a writer leaves. (Zeros over the last few samples, up to 11 KB with the end itself, make the tar of the
other samples, byte for byte: only a recorded number of samples or content hash tells.)

Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

BLOCK = 512
SIZE_LIMIT = 1 << 30  # bytes of one member
NAME_LIMIT = 4096  # bytes of a member's name, the longest path of Linux
EXTENSION_LIMIT = 1 << 20  # bytes of a pax or long-name header
TAIL_LIMIT = 2 * BLOCK + 20 * BLOCK  # the end marker, and padding to a record of 20 blocks: what tar, Python and libarchive write
NOTES_LIMIT = 100

_PIECE = 1 << 20
_ZEROS = bytes(BLOCK)
_WITHOUT_DATA = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"5": "", b"6": "a pipe"}
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
_ADLER = 65521  # the prime of Adler-32, whose low half is 1 + the sum of all bytes modulo it: a header's sum at C speed


class ShardError(ValueError):
    """A shard that cannot be used whole. The message names the shard, the byte, the samples found so far and the remedy."""

    def __init__(self, message: str, shard: str = "", offset: int = 0, samples: int = 0) -> None:
        super().__init__(message)
        self.shard, self.offset, self.samples = shard, offset, samples


class Member(NamedTuple):
    """A regular file in the tar: name, byte offset of its header and of its data, size, CRC-32 (0 unless read), first MiB."""

    name: str
    header: int
    offset: int
    size: int
    crc32: int
    head: bytes


class TarWalk:
    """One pass over a tar.

    Args:
        file: binary file at its beginning; it needs ``read``, and ``seek`` when ``crc`` is False.
        shard: the name used in messages.
        size_limit: bytes; a larger member is refused.
        crc: read the data and compute each member's CRC-32 (zlib's).
        progress: called with the number of bytes done after each member.

    Attributes:
        samples: set by the caller, for messages.
        notes: the first 100 remarks on what was skipped or looks odd; ``noted`` counts all.
        largest: bytes of the largest member.
    """

    def __init__(
        self, file: BinaryIO, shard: str, size_limit: int = SIZE_LIMIT, crc: bool = True, progress: Callable[[int], None] | None = None
    ) -> None:
        self.file, self.shard, self.size_limit, self.crc, self.progress = file, shard, size_limit, crc, progress
        self.samples = self.position = self.noted = self.largest = 0
        self.notes: list[str] = []
        self.total = file.seek(0, 2) if file.seekable() else None
        if self.total is not None:
            file.seek(0)

    def error(self, text: str, offset: int) -> ShardError:
        return ShardError(f"{self.shard}: at byte {offset:,}, after {self.samples:,} samples: {text}", self.shard, offset, self.samples)

    def note(self, offset: int, text: str) -> None:
        self.noted += 1
        if len(self.notes) < NOTES_LIMIT:
            self.notes.append(f"byte {offset:,}: {text}")

    def members(self) -> Iterator[Member]:
        """Yields the regular files in order.

        Raises:
            ShardError: for anything that could hide samples, and for what exceeds a limit.
        """
        everywhere: dict[bytes, bytes] = {}
        here: dict[bytes, bytes] = {}
        while (header := self._header()) != _ZEROS:
            at = self.position - BLOCK
            self._verify(header, at)
            kind, size = header[156:157], _number(header[124:136])
            if size < 0:
                raise self.error(f"the header's size {header[124:136]!r} is no number; write the shard again", at)
            if kind in b"xXgLK":
                self._extension(kind, size, everywhere if kind == b"g" else here, at)
                continue
            attributes = {**everywhere, **here} if everywhere else here
            name = self._name(header, attributes, at)
            if b"size" in attributes:
                size = self._decimal(attributes[b"size"], at)
            here = {}
            if kind in _WITHOUT_DATA or (kind == b"\0" and name.endswith("/")):
                if what := _WITHOUT_DATA.get(kind, ""):
                    self.note(at, f"{name!r} is {what}: skipped")
            elif kind in (b"0", b"\0", b"7"):
                offset = self.position
                crc32, head = self._data(name, size, at, self.crc)
                yield Member(name, at, offset, size, crc32, head)
            else:
                self._other(kind, name, size, at)
            if self.progress is not None:
                self.progress(self.position)
        self._end(bool(here))

    def _header(self) -> bytes:
        at = self.position
        header = self.file.read(BLOCK)
        self.position += len(header)
        if len(header) == BLOCK:
            return header
        if not self.position:
            raise self.error("the file is empty (0 bytes): fetch or write it again", 0)
        if not header:
            raise self.error("the file ends without an end marker: it was cut between two members; fetch or write it again", at)
        text = f"truncated: the file ends inside a header, after {len(header)} of its 512 bytes; fetch or write it again"
        raise self.error((not at and _compressed(header)) or text, at)

    def _verify(self, header: bytes, at: int) -> None:
        field = header[148:156]
        stored = _number(field)
        rest = 8 * 32 - sum(field)  # the sum is made with the checksum's own field as spaces
        if stored >= 0 and ((zlib.adler32(header) & 0xFFFF) - 1 + rest - stored) % _ADLER == 0:
            return
        signed = sum(byte - 256 if byte > 127 else byte for byte in header[:148] + header[156:]) + 8 * 32  # of some old writers
        if stored != signed:
            raise self.error(self._damage(header, at), at)

    def _damage(self, header: bytes, at: int) -> str:
        if at:
            return "the header's checksum is wrong: bytes of the shard have changed; fetch or write it again"
        return _compressed(header) or "this is no tar file, or its first header is damaged (wrong checksum); fetch or write it again"

    def _decimal(self, value: bytes, at: int) -> int:
        if not value.isdigit() or len(value) > 18:
            raise self.error(f"the pax header's size {value[:40]!r} is no number; write the shard again", at)
        return int(value)

    def _extension(self, kind: bytes, size: int, into: dict[bytes, bytes], at: int) -> None:
        if size > EXTENSION_LIMIT:
            raise self.error(f"an extended header of {size:,} bytes exceeds the limit of {EXTENSION_LIMIT:,}; write the shard again", at)
        body = self._take(size, "an extended header", at)
        self._take(-size % BLOCK, "an extended header", at)
        if kind == b"L":
            into[b"path"] = body.rstrip(b"\0")
        elif kind != b"K":  # the target of a link, which is skipped anyway
            self._records(body, into, at)

    def _records(self, body: bytes, into: dict[bytes, bytes], at: int) -> None:
        start = 0
        while start < len(body):
            space = body.find(b" ", start, start + 9)
            length = body[start:space] if space > 0 else b""
            end = start + (int(length) if length.isdigit() else 0)
            key, equals, value = body[space + 1 : end - 1].partition(b"=")
            if end <= space + 1 or end > len(body) or body[end - 1 : end] != b"\n" or not equals:
                raise self.error("the pax header cannot be read: bytes of the shard have changed; fetch or write it again", at)
            into[key] = value
            start = end

    def _name(self, header: bytes, attributes: dict[bytes, bytes], at: int) -> str:
        if any(key.startswith(b"GNU.sparse.") for key in attributes):
            raise self.error("a sparse member, whose bytes are not those of the file; write the shard without --sparse", at)
        raw = attributes.get(b"path") or header[:100].split(b"\0", 1)[0]
        if b"path" not in attributes and header[257:263] == b"ustar\0" and header[345]:
            raw = header[345:500].split(b"\0", 1)[0] + b"/" + raw
        if len(raw) > NAME_LIMIT:
            raise self.error(f"a name of {len(raw):,} bytes exceeds the limit of {NAME_LIMIT:,}; write the shard with shorter names", at)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"the name {raw[:200]!r} is not UTF-8; write the shard with names in UTF-8", at) from None
        if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
            self.note(at, f"{name!r} has an absolute path, '..' or control characters; it is harmless here, not for who unpacks the shard")
        return name

    def _other(self, kind: bytes, name: str, size: int, at: int) -> None:
        if kind in b"SM":
            what = "a sparse member" if kind == b"S" else "a member continued from another volume"
            raise self.error(f"{name!r} is {what}, whose bytes are not those of the file; write the shard as a plain tar", at)
        self._data(name, size, at, crc=False)
        self.note(at, f"{name!r} has the unknown type {kind!r}: skipped")

    def _data(self, name: str, size: int, at: int, crc: bool) -> tuple[int, bytes]:
        if size > self.size_limit:
            raise self.error(
                f"{name!r} has {size:,} bytes and exceeds size_limit={self.size_limit:,}; raise the limit, or leave it out", at
            )
        padded = size + -size % BLOCK
        if self.total is not None and self.position + padded > self.total:
            raise self._truncated(f"{name!r}", padded, self.total - self.position, at)
        self.largest = max(self.largest, size)
        if not crc and self.total is not None:
            self.file.seek(padded, 1)
            self.position += padded
            return 0, b""
        head = self._take(min(size, _PIECE), f"{name!r}", at)
        crc32, left = zlib.crc32(head) if crc else 0, size - len(head)
        while left:
            piece = self._take(min(left, _PIECE), f"{name!r}", at)
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
        self._take(padded - size, f"{name!r}", at)
        return crc32, head

    def _take(self, count: int, what: str, at: int) -> bytes:
        data = self.file.read(count) if count else b""
        self.position += len(data)
        if len(data) != count:
            raise self._truncated(what, count, len(data), at)
        return data

    def _truncated(self, what: str, needed: int, left: int, at: int) -> ShardError:
        return self.error(f"truncated: {what} needs {needed:,} bytes, and {left:,} are left; fetch or write it again", at)

    def _end(self, pending: bool) -> None:
        """Checks that nothing but zeros follows the first zero block, and not more of them than the end of a tar."""
        at = self.position - BLOCK
        if pending:
            raise self.error("an extended header without the member it describes; fetch or write the shard again", at)
        while piece := self.file.read(_PIECE):
            if zeros := piece.strip(b"\0"):
                offset = self.position + piece.index(zeros[:1])
                raise self.error(
                    f"a block of zeros, but data follows at byte {offset:,}: the header here was wiped, or tars were concatenated;"
                    " fetch or write the shard again",
                    at,
                )
            self.position += len(piece)
        if self.position - at > TAIL_LIMIT:
            raise self.error(
                f"{self.position - at:,} bytes of zeros up to the end, and the end of a tar needs at most {TAIL_LIMIT:,}: the rest was"
                " wiped or never arrived; fetch the shard again, or write it with the usual record of 20 blocks",
                at,
            )


def _compressed(start: bytes) -> str | None:
    """What to say about a file that starts so, when a known format of compression does."""
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            return f"the file is compressed with {name}: samples are read by byte offset, so decompress the shard first"
    return None


def _number(field: bytes) -> int:
    """A number of a header: octal digits, or base 256 when the first bit is set; -1 when it is neither or negative."""
    if field[0] & 0x80:
        return -1 if field[0] == 0xFF else int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        return -1
    return int(text, 8)

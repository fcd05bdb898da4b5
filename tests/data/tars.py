"""Makes the tars of the index and storage tests: samples with pictures and text, whole or damaged."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path

BLOCK = 512


def tar_bytes(files: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, **fields: object) -> bytes:
    """A tar of these files, in order, with Python's writer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in fields.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    """A black picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes((width * 3 + 1) * height))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def files(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    """``count`` samples 000000.png (of different sizes) and 000000.txt."""
    made = []
    for number in range(first, first + count):
        made += [(f"{number:06d}.png", png(3 + number % 5, 2 + number % 3)), (f"{number:06d}.txt", f"caption {number}".encode())]
    return made


def write_tar(path: Path, count: int, first: int = 0) -> Path:
    path.write_bytes(tar_bytes(files(count, first)))
    return path


def header_offsets(data: bytes) -> list[int]:
    """Where the members' headers are."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [member.offset for member in tar.getmembers()]


def header(name: bytes, size: int | bytes, kind: bytes = b"0", magic: bytes = b"ustar\x0000") -> bytes:
    """One raw header with a right checksum; ``size`` in octal, or the field's 12 bytes."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0" + b" " * 8 + kind + bytes(100) + magic
    block = block.ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def member(name: bytes, data: bytes, kind: bytes = b"0") -> bytes:
    """A raw header with its data, padded."""
    return header(name, len(data), kind) + data + bytes(-len(data) % BLOCK)


END = bytes(2 * BLOCK)

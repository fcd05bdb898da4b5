"""Height and width of a JPEG or PNG from its first bytes, without an image library."""

from __future__ import annotations

_NO_SIZE = {0xC4, 0xC8, 0xCC}  # markers among C0..CF that start no frame


def picture_size(head: bytes) -> tuple[int, int]:
    """Height and width in pixels as the header states them (no EXIF rotation), or (0, 0) when they are not found.

    Source: PNG specification, section 11.2.2 (IHDR); ITU-T T.81, sections B.1.1.2 and B.2.2 (frame header).
    """
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        return int.from_bytes(head[20:24], "big"), int.from_bytes(head[16:20], "big")
    if head[:2] != b"\xff\xd8":
        return 0, 0
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            return int.from_bytes(head[at + 5 : at + 7], "big"), int.from_bytes(head[at + 7 : at + 9], "big")
        else:
            at += 2 + max(2, int.from_bytes(head[at + 2 : at + 4], "big"))
    return 0, 0

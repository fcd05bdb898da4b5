"""Pictures: bytes -> RGB uint8, resized as the CLIP and SigLIP processors do; normalised later, on the device.

Legend: N pictures, C = 3 channels, H height, W width, S size of the square that the model sees, in pixels.

Rules, the same for every decoder:

- JPEG, PNG, WebP, GIF and BMP; of an animation the first frame. Nothing else is opened: some of Pillow's formats start programs.
- The orientation of the EXIF (or XMP) header is applied, as ``transformers.image_utils.load_image`` does.
- Transparency is composited on white, grey and palettes become RGB, as ``transformers.image_transforms.convert_to_rgb`` does.
- 16-bit grey keeps its high byte. Here transformers differs: Pillow's conversion, which it uses, turns all above 255 white.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from PIL import Image, features

from lightning_megascale.data.quarantine import BadSample

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

LIMIT_PIXELS = 89_478_485  # Pillow's own threshold for a warning: a quarter of a GiB of RGB
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # Radford et al. 2021, code of CLIP
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)  # Zhai et al. 2023, code of SigLIP
Mode = Literal["clip", "siglip"]

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112
_DECODE_ERRORS = (  # what Pillow and simplejpeg raise for bytes that are no whole picture; MemoryError is not among them
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def default_decoder() -> str:
    """The decoder of JPEG files: "simplejpeg" where it is installed, "pillow" otherwise."""
    return "pillow" if simplejpeg is None else "simplejpeg"


def decoder_version() -> str:
    """The decoders with their versions: best equal on all ranks, since other versions may read a damaged file in another way."""
    jpeg = f"pillow's libjpeg {features.version('jpg')}" if simplejpeg is None else f"simplejpeg {version('simplejpeg')}"
    return f"{jpeg}, pillow {Image.__version__}"


def decode(data: bytes, *, limit_pixels: int = LIMIT_PIXELS, decoder: str | None = None) -> np.ndarray:
    """The picture in a file's bytes, by the rules above.

    Args:
        data: the whole file.
        limit_pixels: largest H x W, read from the header before anything is decoded.
        decoder: "simplejpeg" or "pillow", for JPEG; None takes ``default_decoder``.

    Returns:
        (H, W, 3) uint8.

    Raises:
        BadSample: for what is no whole picture of a known format, or a larger one.
    """
    image = _open(data, limit_pixels)
    try:
        orientation = _orientation(image)
        pixels = _fast(data, image) if (decoder or default_decoder()) == "simplejpeg" else None
        if pixels is None:
            pixels = np.asarray(_to_rgb(image))
    except _DECODE_ERRORS as error:
        raise BadSample(f"the picture cannot be decoded: {_words(error)}") from error
    return np.ascontiguousarray(_turn(pixels, orientation))


def _fast(data: bytes, image: Image.Image) -> np.ndarray | None:
    """The pixels (H, W, 3) of a sound JPEG by simplejpeg, or None: Pillow alone decides what is bad, so it does not matter which ranks
    have simplejpeg, which calls many a slightly damaged file bad that Pillow reads. Pixels are the same."""
    if image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        return simplejpeg.decode_jpeg(data, colorspace="RGB")
    except ValueError:
        return None


def size_of(data: bytes, *, limit_pixels: int = LIMIT_PIXELS) -> tuple[int, int]:
    """Height and width that ``decode`` would give, from the header alone.

    Raises:
        BadSample: for what has no such header.
    """
    image = _open(data, limit_pixels)
    return (image.width, image.height) if _orientation(image) >= 5 else (image.height, image.width)


def format_of(data: bytes, *, limit_pixels: int = LIMIT_PIXELS) -> str:
    """The usual extension of the file's real format: jpg, png, webp, gif or bmp.

    Raises:
        BadSample: for what has no header of these.
    """
    found = _open(data, limit_pixels).format or ""
    return {"JPEG": "jpg", "MPO": "jpg"}.get(found, found.lower())


def _open(data: bytes, limit_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except _DECODE_ERRORS as error:
        raise BadSample(f"{len(data)} bytes are no JPEG, PNG, WebP, GIF or BMP picture: {_words(error)}") from error
    if not 0 < image.width * image.height <= limit_pixels:
        raise BadSample(f"a picture of {image.width} x {image.height} pixels; at least one and at most {limit_pixels} are decoded")
    return image


def _words(error: Exception) -> str:
    return str(error).split("<_io.")[0].strip() or type(error).__name__  # without the address of a buffer, which differs per process


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 .. 8; 1 where the header has none, or one that cannot be read.

    Source: CIPA DC-008 (Exif 2.32), tag 274.
    """
    try:
        found = Image.Image.getexif(image).get(_ORIENTATION, 1)  # PngImageFile.getexif would decode the whole picture
    except _DECODE_ERRORS:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """(H, W, 3) as the camera stored it -> as it is to be seen."""
    if orientation >= 5:  # rows and columns exchanged
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def resize(image: np.ndarray, size: int, mode: Mode = "clip", *, limit_pixels: int = LIMIT_PIXELS) -> np.ndarray:
    """A square of ``size`` pixels, still uint8: bit for bit what the processors compute before they rescale.

    Args:
        image: (H, W, 3) uint8.
        size: S.
        mode: "clip" resizes the shorter edge to S and cuts out the centre; "siglip" resizes both edges to S.
        limit_pixels: largest picture that "clip" may make on the way; a line of 1 x 100,000 pixels would become a bomb.

    Returns:
        (S, S, 3) uint8.

    Raises:
        BadSample: for a picture too long and narrow.
        ValueError: for an unknown mode.

    Source: bicubic resampling with a = -0.5 and antialiasing, as in Pillow; CLIPImageProcessor and SiglipImageProcessor of transformers.
    """
    if mode not in ("clip", "siglip"):
        raise ValueError(f"image mode {mode!r}: 'clip' (shorter edge, then the centre) or 'siglip' (both edges); choose one")
    height, width = image.shape[:2]
    if mode == "siglip":
        return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
    short = min(height, width)
    new_height, new_width = int(size * height / short), int(size * width / short)
    if new_height * new_width > limit_pixels:
        raise BadSample(f"a picture of {width} x {height} pixels, too narrow to bring its shorter edge to {size}")
    resized = np.asarray(Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC))
    top, left = (new_height - size) // 2, (new_width - size) // 2
    return np.ascontiguousarray(resized[top : top + size, left : left + size])


def normalise(
    pixel_values: torch.Tensor,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(pixel / 255 - mean) / std, on the device that holds the pixels.

    Args:
        pixel_values: (N, 3, H, W) uint8.
        mean, std: of each channel, for pixels in 0 .. 1.
        dtype: of the result; the arithmetic is float32.

    Returns:
        (N, 3, H, W).
    """
    shape = (len(mean), 1, 1)
    mean_C11 = torch.tensor(mean, dtype=torch.float32).mul(255).to(pixel_values.device).view(shape)
    std_C11 = torch.tensor(std, dtype=torch.float32).mul(255).to(pixel_values.device).view(shape)
    return (pixel_values.to(torch.float32) - mean_C11).div_(std_C11).to(dtype)


def image_token_count(height: int, width: int, patch: int, *, merge: int = 1, extra: int = 0) -> int:
    """Tokens that a picture of this size, as the model sees it, takes in the sequence.

    Args:
        height, width: in pixels, after resizing; what does not fill a patch is cut off, as a convolution with stride = patch does.
        patch: edge of a patch, in pixels.
        merge: edge of the squares of patches that become one token (pixel shuffle).
        extra: tokens beside the patches, for example 1 for a class token that is kept.

    Raises:
        ValueError: when the picture has no whole patch, or patches do not fill the squares.

    Source: ViT, Dosovitskiy et al. 2021, section 3.1 (N = HW / P^2); merging as LLaVA-OneVision, InternVL and Qwen2-VL do.
    """
    rows, columns = height // patch, width // patch
    if min(rows, columns) < 1 or merge < 1 or rows % merge or columns % merge:
        raise ValueError(
            f"a picture of {height} x {width} pixels has {rows} x {columns} patches of {patch}, which do not fill squares of"
            f" {merge} x {merge}: choose an image size that is a multiple of patch x merge = {patch * merge}"
        )
    return (rows // merge) * (columns // merge) + extra

"""Pictures: equal to transformers' processors, one rule for every kind of file, and nothing that a file can do but be bad."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from lightning_megascale.data import images
from lightning_megascale.data.quarantine import BadSample

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")  # about damaged files
DECODERS = ["pillow", *(["simplejpeg"] if images.simplejpeg is not None else [])]


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth shapes with noise, (height, width, channels) uint8."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c) + seed) * 60 + np.cos(columns / (5 + c)) * 60 + 128 for c in range(channels)]
    return np.clip(np.stack(waves, -1) + generator.normal(0, 8, (height, width, channels)), 0, 255).astype(np.uint8)


def file(image: np.ndarray | Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", body) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode, size", [("clip", 48), ("clip", 33), ("siglip", 48), ("siglip", 33)])
def test_pixels_are_those_of_transformers(mode: str, size: int) -> None:
    """The uint8 pixels bit for bit; normalised ones within 5e-7, two steps of float32 at the largest value (2.64)."""
    kinds: dict[str, object] = {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil}
    dims = {
        "clip": {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}},
        "siglip": {"size": {"height": size, "width": size}},
    }
    processor = kinds[mode](**dims[mode])  # type: ignore[operator]
    mean, std = {"clip": (images.CLIP_MEAN, images.CLIP_STD), "siglip": (images.SIGLIP_MEAN, images.SIGLIP_STD)}[mode]
    assert (list(mean), list(std)) == (list(processor.image_mean), list(processor.image_std))
    for seed, (height, width) in enumerate([(100, 141), (141, 100), (48, 48), (33, 50), (20, 31), (31, 20), (300, 7), (1, 1)]):
        image = picture(height, width, seed=seed)
        pixels = images.resize(image, size, mode)
        assert pixels.shape == (size, size, 3) and pixels.dtype == np.uint8
        raw = processor(Image.fromarray(image), do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(pixels.transpose(2, 0, 1), raw)
        expected = processor(Image.fromarray(image), return_tensors="pt")["pixel_values"]
        ours = images.normalise(torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()), mean, std)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=0, atol=5e-7)


def test_normalise_leaves_its_input_and_gives_the_type_asked_for() -> None:
    pixels = torch.full((1, 3, 2, 2), 255.0)
    result = images.normalise(pixels, images.SIGLIP_MEAN, images.SIGLIP_STD, torch.bfloat16)
    assert (pixels == 255).all() and result.dtype == torch.bfloat16 and (result == 1).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_kind_of_file_becomes_rgb(decoder: str) -> None:
    colours = picture(40, 30)
    alpha = np.concatenate([colours, picture(40, 30, 1, seed=1)], -1)
    palette = Image.fromarray(colours).quantize(16)
    cases: dict[str, bytes] = {
        "png": file(colours, "PNG"),
        "jpg": file(colours, "JPEG", quality=90),
        "progressive": file(colours, "JPEG", progressive=True, subsampling=2),
        "webp": file(colours, "WEBP", lossless=True),
        "gif": file(palette, "GIF"),
        "bmp": file(colours, "BMP"),
        "grey": file(colours[..., 0], "PNG"),
        "grey jpg": file(colours[..., 0], "JPEG"),
        "cmyk": file(Image.fromarray(colours).convert("CMYK"), "JPEG"),
        "rgba": file(alpha, "PNG"),
        "rgba webp": file(alpha, "WEBP", lossless=True),
        "grey alpha": file(Image.fromarray(alpha).convert("LA"), "PNG"),
        "palette": file(palette, "PNG"),
        "clear palette": file(palette, "PNG", transparency=bytes(range(0, 160, 10))),
        "clear colour": file(colours, "PNG", transparency=tuple(int(c) for c in colours[3, 4])),
        "one bit": file(Image.fromarray(colours).convert("1"), "PNG"),
    }
    for name, data in cases.items():
        decoded = images.decode(data, decoder=decoder)
        expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
        assert decoded.dtype == np.uint8 and decoded.flags.c_contiguous
        np.testing.assert_array_equal(decoded, expected, err_msg=name)
        assert images.size_of(data) == (40, 30)
    np.testing.assert_array_equal(images.decode(cases["png"]), colours)
    assert (images.decode(file(np.zeros((2, 2, 4), np.uint8), "PNG")) == 255).all()  # clear is white
    assert {name: images.format_of(cases[name]) for name in ("png", "jpg", "webp", "gif", "bmp")} == {
        name: name for name in ("png", "jpg", "webp", "gif", "bmp")
    }


def test_sixteen_bits_keep_their_high_byte() -> None:
    deep = (np.arange(20 * 30).reshape(20, 30) * 109).astype(np.uint16)
    data = file(deep, "PNG")
    np.testing.assert_array_equal(images.decode(data), np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, -1))
    assert (convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)[deep > 255] == 255).all()  # what transformers makes of it


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.fromarray(picture(20, 30, seed=seed)) for seed in range(3)]
    data = file(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    np.testing.assert_array_equal(images.decode(data), np.asarray(frames[0]))


@pytest.mark.parametrize("decoder", DECODERS)
def test_orientation_is_applied(decoder: str) -> None:
    image = Image.fromarray(picture(24, 40))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP"):
            data = file(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
            expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
            np.testing.assert_array_equal(images.decode(data, decoder=decoder), expected, err_msg=f"{kind} {orientation}")
            assert images.size_of(data) == expected.shape[:2] == ((40, 24) if orientation >= 5 else (24, 40))
    for nonsense in (0, 9):
        exif = Image.Exif()
        exif[0x0112] = nonsense
        assert images.size_of(file(image, "JPEG", exif=exif)) == (24, 40)
    assert images.size_of(file(image, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")) == (24, 40)  # a header that cannot be read


def test_bombs_are_refused_before_they_are_decoded() -> None:
    for width, height in [(10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)]:
        for function in (images.decode, images.size_of):
            with pytest.raises(BadSample, match="pixels"):
                function(png_header(width, height))
    assert images.size_of(png_header(90, 100)) == (100, 90)
    with pytest.raises(BadSample, match="a picture of 40 x 30 pixels; at least one and at most 1199 are decoded"):
        images.decode(file(picture(30, 40), "PNG"), limit_pixels=1199)
    assert images.decode(file(picture(30, 40), "PNG"), limit_pixels=1200).shape == (30, 40, 3)
    with pytest.raises(BadSample, match="3 x 3000 pixels, too narrow to bring its shorter edge to 224"):
        images.resize(picture(3000, 3), 224, limit_pixels=10_000_000)
    assert images.resize(picture(3000, 3), 224, "siglip", limit_pixels=10_000).shape == (224, 224, 3)


@pytest.mark.parametrize("decoder", DECODERS)
def test_damaged_files_are_bad_samples(decoder: str) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = file(picture(64, 64), kind)
        for cut in (0, 1, 10, len(data) // 2, len(data) - 40):
            with pytest.raises(BadSample, match="no JPEG, PNG, WebP, GIF or BMP picture|cannot be decoded"):
                images.decode(data[:cut], decoder=decoder)
    for kind in ("TIFF", "PPM", "EPS", "ICO"):  # whole, but of no format that is opened
        with pytest.raises(BadSample, match="no JPEG, PNG, WebP, GIF or BMP picture"):
            images.decode(file(picture(20, 20), kind), decoder=decoder)
    for data in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", b"II*\0" + b"\0" * 50, b"<svg/>", png_header(0, 5)):
        with pytest.raises(BadSample):
            images.decode(data, decoder=decoder)


def test_a_reason_is_the_same_in_every_process() -> None:
    reasons = []
    for _ in range(2):
        with pytest.raises(BadSample) as caught:
            images.decode(bytes(20))
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1] and "0x" not in reasons[0]


@pytest.mark.parametrize("decoder", DECODERS)
def test_no_bytes_do_more_than_be_bad(decoder: str) -> None:
    """Flipped, cut and overwritten bytes of six kinds of files: an array or BadSample, never another error."""
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = [
        ("JPEG", {"exif": exif}),
        ("PNG", {"exif": exif}),
        ("WEBP", {"exif": exif}),
        ("GIF", {}),
        ("BMP", {}),
        ("JPEG", {"progressive": True}),
    ]
    generator = np.random.default_rng(0)
    good = 0
    for kind, options in kinds:
        original = np.frombuffer(file(picture(24, 16), kind, **options), dtype=np.uint8)
        for _ in range(300):
            data = original.copy()
            places = generator.integers(0, min(len(data), generator.choice([40, 200, 10_000])), generator.integers(1, 6))
            data[places] = generator.integers(0, 256, len(places))
            try:
                assert images.decode(data.tobytes(), limit_pixels=1_000_000, decoder=decoder).shape[2] == 3
                good += 1
            except BadSample:
                pass
    assert 100 < good < 1700


@pytest.mark.skipif(images.simplejpeg is None, reason="simplejpeg is not installed")
def test_which_decoder_is_installed_makes_no_difference() -> None:
    """Sound files and damaged ones: the same pixels, and the same files bad. simplejpeg alone would refuse a third of the latter."""
    generator = np.random.default_rng(0)
    sound = [{"quality": 50}, {"quality": 95, "subsampling": 0}, {"subsampling": 2, "progressive": True}]
    bad = 0
    for seed, options in enumerate(sound):
        data = np.frombuffer(file(picture(67, 93, seed=seed), "JPEG", **options), dtype=np.uint8)
        for flips in [0, *[2] * 150]:
            damaged = data.copy()
            damaged[generator.integers(0, len(data), flips)] = generator.integers(0, 256, flips)
            results = []
            for decoder in DECODERS:
                try:
                    results.append(images.decode(damaged.tobytes(), limit_pixels=1_000_000, decoder=decoder))
                except BadSample as error:
                    results.append(np.frombuffer(str(error).encode(), dtype=np.uint8))
                    bad += 1
            np.testing.assert_array_equal(*results)
            assert flips or results[0].ndim == 3
    assert 20 < bad < 880


def test_decoders_are_named() -> None:
    assert images.default_decoder() in DECODERS
    assert Image.__version__ in images.decoder_version()


def test_tokens_of_an_image() -> None:
    assert images.image_token_count(336, 336, 14) == 576  # LLaVA-1.5
    assert images.image_token_count(384, 384, 14) == 729  # SigLIP so400m: 384 = 27 x 14 + 6
    assert images.image_token_count(224, 224, 16, extra=1) == 197  # ViT-B/16 with its class token
    assert images.image_token_count(448, 448, 14, merge=2) == 256  # InternVL
    assert images.image_token_count(28, 56, 14, merge=2) == 2
    for arguments in ((13, 28, 14), (42, 28, 14)):
        with pytest.raises(ValueError, match=r"choose an image size that is a multiple of patch x merge = 28"):
            images.image_token_count(*arguments, merge=2)
    with pytest.raises(ValueError, match="image mode 'pad': 'clip'"):
        images.resize(picture(8, 8), 4, "pad")  # type: ignore[arg-type]

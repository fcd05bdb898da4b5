"""Any-resolution tiling: counts and pixels equal to transformers' LLaVA-NeXT, at the edges too, and mistakes named."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches, unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from lightning_megascale.data.image_tiles import best_grid, num_image_tokens, tiles_of, unpadded
from lightning_megascale.data.quarantine import BadSample

NEXT = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]  # image_grid_pinpoints of llava-v1.6 (config.json), tile 336
ENCODERS = {  # tile, patch, grids: CLIP-L/336 has an even number of patches a side, SigLIP-so400m/384 an odd one and 6 pixels left over
    "clip": (336, 14, NEXT),
    "siglip": (384, 14, [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)]),  # as in LLaVA-OneVision
    "one tile": (48, 16, [(48, 48)]),
}
EDGES = [(1, 1), (1, 4000), (4000, 1), (3, 4000), (2, 3), (7, 5), (336, 336), (672, 336), (337, 671), (5000, 4999), (600, 6000)]


def random_sizes(count: int = 200, seed: int = 0) -> list[tuple[int, int]]:
    """(height, width): sides of 1 to 4000 pixels, even in the logarithm so that odd proportions are many."""
    return [(int(h), int(w)) for h, w in np.exp(np.random.default_rng(seed).uniform(0, np.log(4001), (count, 2)))]


def processor_count(height: int, width: int, tile: int, patch: int, grids: list[tuple[int, int]]) -> int:
    """What LlavaNextProcessor writes placeholders for, without the class token that its model drops."""
    processor = object.__new__(LlavaNextProcessor)  # its constructor wants a tokenizer, which does not count
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=grids)
    processor.patch_size, processor.num_additional_image_tokens = patch, 0
    return processor._get_number_of_features(height, width, tile, tile)


def model_count(height: int, width: int, tile: int, patch: int, grids: list[tuple[int, int]], newline: bool = True) -> int:
    """Features that LlavaNextModel gives to the decoder for the views of one picture, one number wide."""
    vision = SimpleNamespace(image_size=tile, patch_size=patch)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision, image_grid_pinpoints=grids))
    views = torch.zeros(image_size_to_num_patches((height, width), grids, tile), (tile // patch) ** 2, 1)
    features, lengths = LlavaNextModel.pack_image_features(model, [views], [(height, width)], "default", torch.ones(1) if newline else None)
    assert len(features[0]) == int(lengths[0])
    return len(features[0])


@pytest.mark.parametrize("encoder", ENCODERS)
def test_counts_are_those_of_the_processor_and_the_model(encoder: str) -> None:
    tile, patch, grids = ENCODERS[encoder]
    sizes = random_sizes() + EDGES
    for height, width in sizes:
        setting = (height, width, tile, patch, grids)
        count = num_image_tokens(height, width, tile=tile, patch=patch, grids=grids)
        assert count == processor_count(*setting) == model_count(*setting), setting
        bare = num_image_tokens(height, width, tile=tile, patch=patch, grids=grids, newline=False)
        assert bare == model_count(*setting, newline=False), setting
    counts = {num_image_tokens(height, width, tile=tile, patch=patch, grids=grids) for height, width in sizes}
    assert len(counts) >= (50 if len(grids) > 1 else 3)  # the sizes do differ in what they give


def test_the_processor_and_its_model_agree_on_a_class_token() -> None:
    """The published setting: CLIP's class token is counted and then dropped ("default"), so the number is ours."""
    images = LlavaNextImageProcessorPil(size={"shortest_edge": 336}, image_grid_pinpoints=[list(grid) for grid in NEXT])
    processor = object.__new__(LlavaNextProcessor)
    processor.image_processor, processor.image_token = images, "<image>"
    processor.patch_size, processor.num_additional_image_tokens, processor.vision_feature_select_strategy = 14, 1, "default"
    views = {"pixel_values": np.zeros((1, 5, 3, 336, 336)), "image_sizes": [(500, 800)]}
    assert processor.replace_image_token(views, 0).count("<image>") == num_image_tokens(500, 800, tile=336, patch=14, grids=NEXT)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_best_grid_and_unpadded_are_those_of_transformers(encoder: str) -> None:
    tile, patch, grids = ENCODERS[encoder]
    for height, width in random_sizes(400, seed=1) + EDGES:
        grid = best_grid(height, width, grids)
        assert grid == select_best_resolution((height, width), grids), (height, width)
        for rows, columns in [(side // tile * (tile // patch) for side in grid), (7, 3), (1, 1)]:
            expected = unpad_image(torch.empty(1, rows, columns), (height, width)).shape[1:]
            assert unpadded(height, width, rows, columns) == tuple(expected), (height, width, rows, columns)


def test_by_hand() -> None:
    """100 x 200 pixels, tiles of 48 with 3 x 3 patches: the grid 48 x 96 fits exactly; 100 x 150 leaves columns of it."""
    options = {"tile": 48, "patch": 16, "grids": [(48, 48), (96, 48), (48, 96)]}
    assert best_grid(100, 200, options["grids"]) == (48, 96)
    assert unpadded(100, 200, 3, 6) == (3, 6)
    assert num_image_tokens(100, 200, **options) == 9 + 3 * 6 + 3
    assert num_image_tokens(100, 200, newline=False, **options) == 9 + 3 * 6
    assert num_image_tokens(100, 200, base=False, **options) == 3 * 6 + 3
    assert best_grid(100, 133, options["grids"]) == (48, 96)  # 48 x 63 pixels kept, not 36 x 48
    assert unpadded(100, 133, 3, 6) == (3, 4)  # 3.99 columns, 3 whole ones; (6 - 3) // 2 go on each side
    assert num_image_tokens(100, 133, **options) == 9 + 3 * 4 + 3
    assert num_image_tokens(100, 133, unpad=False, **options) == 9 + 3 * 6 + 3
    assert num_image_tokens(100, 133, unpad=False, newline=False, base=False, **options) == 18
    assert num_image_tokens(100, 133, tile=336, patch=14, grids=()) == 576  # LLaVA-1.5
    assert num_image_tokens(100, 133, tile=384, patch=14, grids=(), newline=False, unpad=False) == 729


def test_ties_go_to_the_least_area_and_then_to_the_first() -> None:
    assert best_grid(10, 10, [(96, 96), (48, 96), (48, 48), (96, 48)]) == (48, 48)  # all keep the 100 pixels
    assert best_grid(10, 10, [(96, 96), (96, 48), (48, 96)]) == (96, 48)
    assert best_grid(1, 4000, NEXT) == (336, 672)  # no grid keeps a pixel row of it; the first of the smallest


def test_a_line_of_pixels_keeps_what_transformers_keeps() -> None:
    """Even rows: nothing is left of the tiles. Odd rows: the middle one. Of a column, the newlines are left."""
    base = 24 * 24
    assert num_image_tokens(1, 4000, tile=336, patch=14, grids=NEXT) == base
    assert num_image_tokens(4000, 1, tile=336, patch=14, grids=NEXT) == base + 24 * (0 + 1)  # also the first of the smallest, 672 wide
    assert unpadded(1, 4000, 27, 54) == (1, 54)
    for height, width in [(1, 4000), (4000, 1)]:
        with pytest.raises(BadSample, match=f"{width} x {height} pixels is too narrow.*base=True or unpad=False"):
            num_image_tokens(height, width, tile=336, patch=14, grids=NEXT, base=False)
    assert num_image_tokens(1, 4000, tile=336, patch=14, grids=NEXT, base=False, unpad=False) == 24 * (48 + 1)


def test_numbers_of_numpy_count_as_whole_ones() -> None:
    """32-bit sides would overflow in the products, and divide in another precision."""
    for height, width in [(60001, 59999), (100, 133), (37, 2999)]:
        assert best_grid(np.int32(height), np.int32(width), NEXT) == best_grid(height, width, NEXT)
        assert unpadded(np.int32(height), np.int32(width), 24, 48) == unpadded(height, width, 24, 48)
    assert unpadded(np.int32(2**30), np.int32(2**30 - 1), 24, 48) == (24, 24)


def picture(height: int, width: int) -> Image.Image:
    """Smooth shapes with noise and no black edge, so that padding shows."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c)) * 50 + np.cos(columns / (5 + c)) * 50 + 140 for c in range(3)]
    noise = np.random.default_rng(height * 7919 + width).normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(waves, -1) + noise, 1, 255).astype(np.uint8))


@pytest.mark.parametrize(
    "size", [(100, 141), (141, 100), (48, 96), (33, 50), (300, 7), (7, 300), (1, 400), (400, 1), (1, 1), (97, 95)], ids=str
)
def test_pixels_are_those_of_the_image_processor(size: tuple[int, int]) -> None:
    """Bit for bit, in order, by the processor that works with Pillow (the other needs torchvision)."""
    grids = [(48, 96), (96, 48), (96, 96), (144, 48), (48, 144)]
    image = picture(*size)
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}, image_grid_pinpoints=[list(grid) for grid in grids]
    )
    options = {"do_rescale": False, "do_normalize": False, "input_data_format": "channels_last"}
    expected = processor(image, return_tensors="np", **options)
    assert tuple(expected["image_sizes"][0]) == size
    views = tiles_of(image, tile=48, grids=grids)
    assert len(views) == image_size_to_num_patches(size, grids, 48) and {view.mode for view in views} == {"RGB"}
    ours = np.stack([np.asarray(view) for view in views])
    np.testing.assert_array_equal(ours.transpose(0, 3, 1, 2), expected["pixel_values"][0])
    np.testing.assert_array_equal(np.stack([np.asarray(view) for view in tiles_of(image, tile=48, grids=grids, base=False)]), ours[1:])
    np.testing.assert_array_equal(np.stack([np.asarray(view) for view in tiles_of(image, tile=48, grids=())]), ours[:1])


def test_the_tiles_are_laid_out_as_the_picture() -> None:
    """Four colours in the quarters of a picture that fills its grid, and black where it does not; the picture itself stays."""
    colours = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 0]]], np.uint8)
    image = Image.fromarray(colours.repeat(8, 0).repeat(8, 1))
    before = image.tobytes()
    tiles = tiles_of(image, tile=8, grids=[(16, 16)], base=False)
    assert [tile.getpixel((4, 4)) for tile in tiles] == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    left, right = (np.asarray(tile) for tile in tiles_of(Image.new("RGB", (5, 8), (9, 9, 9)), tile=8, grids=[(8, 16)], base=False))
    assert (left[:, :5] == 0).all() and (left[:, 5:] == 9).all()  # 16 - 5 = 11 columns of padding: 5 and 6
    assert (right[:, :2] == 9).all() and (right[:, 2:] == 0).all()
    assert image.tobytes() == before


def test_mistakes_are_named() -> None:
    good: dict = {"tile": 48, "patch": 16, "grids": [(48, 96)]}
    for change, message in [
        ({"patch": 49}, r"patch=49 is larger than tile=48.*tile >= patch"),
        ({"tile": 0}, r"tile=0 must be a whole number >= 1"),
        ({"patch": 2.0}, r"patch=2.0 must be a whole number"),
        ({"grids": [(48, 96), (48, 100)]}, r"grids\[1\]=\(48, 100\): each side must be a multiple of tile=48"),
        ({"grids": [(48, 96), 48]}, r"grids\[1\]=48 must be a height and a width in pixels"),
        ({"grids": [(0, 48)]}, r"grids\[0\] height=0 must be a whole number >= 1"),
        ({"grids": [], "base": False}, r"grids=\[\] with base=False shows the encoder nothing"),
    ]:
        with pytest.raises(ValueError, match=message):
            num_image_tokens(10, 10, **{**good, **change})
    for height, width, name in [(0, 10, "height=0"), (10, 0, "width=0"), (10, 1.5, "width=1.5")]:
        for grids in [[(48, 96)], []]:
            with pytest.raises(ValueError, match=f"{name} must be a whole number >= 1"):
                num_image_tokens(height, width, **{**good, "grids": grids})
    with pytest.raises(ValueError, match=r"grids=\[\] is empty; list at least one pair"):
        best_grid(10, 10, [])
    with pytest.raises(ValueError, match="grid_width=0 must be a whole number"):
        unpadded(10, 10, 3, 0)
    with pytest.raises(ValueError, match=r"image.mode='L' must be 'RGB'"):
        tiles_of(Image.new("L", (8, 8)), tile=48, grids=[(48, 96)])
    with pytest.raises(ValueError, match=r"grids\[0\]=\(48, 96\): each side must be a multiple of tile=32"):
        tiles_of(Image.new("RGB", (8, 8)), tile=32, grids=[(48, 96)])
    with pytest.raises(ValueError, match="shows the encoder nothing"):
        tiles_of(Image.new("RGB", (8, 8)), tile=48, grids=[], base=False)

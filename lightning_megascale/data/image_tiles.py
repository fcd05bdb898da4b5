"""Any-resolution pictures: the best grid of tiles, the tiles themselves, and how many tokens they give the sequence.

A picture is shown to a fixed-resolution encoder several times: once whole (the base view) and once per tile of a grid that fits its shape.
The tiles' features are laid side by side as in the picture, those of the padding are cut away, and one newline ends each row.

Nothing here needs torch. Counts and pixels are those of LLaVA-NeXT in transformers 5.24. Limits:

- tiles are square, and each side of a grid is a multiple of the tile;
- all features are kept: no pooling, and no bound on the tiles beyond the largest grid (LLaVA-OneVision's ``anyres_max_9`` has one);
- a picture far longer than its grid may keep none of the tiles' features when the padding is cut, and then has its base view alone.

Source: Liu et al. 2024, "LLaVA-NeXT: Improved reasoning, OCR, and world knowledge", dynamic high resolution; rounding as in transformers
(``select_best_resolution``, ``unpad_image``, ``get_patch_output_size``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.stages import whole


def num_image_tokens(
    height: int,
    width: int,
    *,
    tile: int,
    patch: int,
    grids: Sequence[Sequence[int]],
    newline: bool = True,
    base: bool = True,
    unpad: bool = True,
) -> int:
    """Tokens that a picture takes in the sequence: the base view's, the tiles' after the cut, and a newline per row of these.

    Args:
        height, width: of the picture in pixels, before any resizing.
        tile: edge of the square that the encoder sees, in pixels.
        patch: edge of a patch, in pixels; what does not fill a patch is cut off, as a convolution with stride = patch does.
        grids: (height, width) of each grid, in pixels; empty for an encoder of one fixed resolution: the plain (tile // patch)^2, no
            newline.
        newline: whether a newline ends each row of the tiles' features; the base view has none.
        base: whether the whole picture goes before its tiles.
        unpad: whether the features of the padding are cut away.

    Raises:
        ValueError: for a size or grid out of range.
        BadSample: for a picture so long and narrow that the cut leaves nothing of it, without a base view.

    Source: ViT, Dosovitskiy et al. 2021, section 3.1 (N = HW / P^2) per view; the sum as ``_get_number_of_features`` of
    transformers' LlavaNextProcessor and ``pack_image_features`` of its model.
    """
    edge = whole("tile", tile, 1) // whole("patch", patch, 1)
    if edge < 1:
        raise ValueError(f"patch={patch} is larger than tile={tile}: a tile holds at least one patch; choose tile >= patch")
    _check_grids(grids, tile, base)
    height, width = whole("height", height, 1), whole("width", width, 1)
    if not grids:
        return edge * edge
    grid_height, grid_width = best_grid(height, width, grids)
    rows, columns = grid_height // tile * edge, grid_width // tile * edge
    if unpad:
        rows, columns = unpadded(height, width, rows, columns)
    if not base and not rows * columns:
        raise BadSample(
            f"a picture of {width} x {height} pixels is too narrow: without the padding nothing of its grid of {grid_width} x {grid_height}"
            " is left; use base=True or unpad=False to keep such pictures"
        )
    return edge * edge * bool(base) + rows * (columns + bool(newline))


def best_grid(height: int, width: int, grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The grid that keeps most of the picture's pixels and, among equals, has the least area left over; the first listed of those.

    Pixels kept are those of the picture as it is scaled to fit, and never more than it has.

    Args:
        height, width: of the picture in pixels.
        grids: (height, width) of each grid, in pixels.

    Returns:
        Height and width of the grid in pixels.

    Raises:
        ValueError: for a size below 1, no grids, or a grid that is no pair of sizes.

    Source: ``select_best_resolution`` of transformers, with its float64 scale and its cut to whole pixels: both decide ties.
    """
    height, width = whole("height", height, 1), whole("width", width, 1)
    if not grids:
        raise ValueError(f"grids={grids!r} is empty; list at least one pair (height, width) in pixels")

    def merit(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]  # the second is minus the area left over

    return max((_pair(number, grid) for number, grid in enumerate(grids)), key=merit)  # max keeps the first of equals


def unpadded(height: int, width: int, grid_height: int, grid_width: int) -> tuple[int, int]:
    """Rows and columns of features that are left when those of the padding are cut away.

    The cut takes equally many from both sides, (grid_height - rows) / 2 or (grid_width - columns) / 2, so one row or column of an odd
    number stays. None is left of a picture that would fill no row of an even number, or no column.

    Args:
        height, width: of the picture in pixels.
        grid_height, grid_width: rows and columns of features of the whole grid.

    Returns:
        (rows, columns), each at most the grid's.

    Raises:
        ValueError: for a size below 1.

    Source: ``unpad_image`` of transformers. It rounds the float side to 7 decimals and then down; the exact quotient rounded down is the
    same for pictures of up to 10 million pixels a side.
    """
    height, width = whole("height", height, 1), whole("width", width, 1)
    rows, columns = whole("grid_height", grid_height, 1), whole("grid_width", grid_width, 1)
    if width * rows > height * columns:  # wider than the grid: padding above and below
        return rows - (rows - height * columns // width) // 2 * 2, columns
    return rows, columns - (columns - width * rows // height) // 2 * 2


def tiles_of(image: Image.Image, *, tile: int, grids: Sequence[Sequence[int]], base: bool = True) -> list[Image.Image]:
    """The views of a picture for the encoder: the whole one first, then the tiles row by row.

    The picture is scaled to fit its best grid, padded with black to both sides (the odd pixel to the right and below), and cut. The base
    view is the whole picture resized to a square without regard to its proportions.

    Args:
        image: RGB, for example ``Image.fromarray`` of what ``images.decode`` gives.
        tile: edge of a view in pixels.
        grids: (height, width) of each grid, in pixels; empty for the base view alone.
        base: whether the whole picture goes before its tiles.

    Returns:
        RGB pictures of tile x tile pixels.

    Raises:
        ValueError: for another mode than RGB, or a size or grid out of range.

    Source: LlavaNextImageProcessorPil of transformers before it rescales: bicubic with a = -0.5 and antialiasing, as in Pillow.
    """
    tile = whole("tile", tile, 1)
    _check_grids(grids, tile, base)
    if image.mode != "RGB":
        raise ValueError(f"image.mode={image.mode!r} must be 'RGB'; decode the file with images.decode, or call image.convert('RGB')")
    views = [image.resize((tile, tile), Image.Resampling.BICUBIC)] if base else []
    if not grids:
        return views
    grid_height, grid_width = best_grid(image.height, image.width, grids)
    padded = _fitted(image, grid_height, grid_width)
    corners = ((left, top) for top in range(0, grid_height, tile) for left in range(0, grid_width, tile))
    return views + [padded.crop((left, top, left + tile, top + tile)) for left, top in corners]


def _fitted(image: Image.Image, height: int, width: int) -> Image.Image:
    """The picture scaled to fit into height x width pixels, in the middle of black; a side that is no whole number is rounded up."""
    across, down = width / image.width, height / image.height
    if across < down:
        new_width, new_height = width, min(math.ceil(image.height * across), height)
    else:
        new_width, new_height = min(math.ceil(image.width * down), width), height
    padded = Image.new("RGB", (width, height))
    padded.paste(image.resize((new_width, new_height), Image.Resampling.BICUBIC), ((width - new_width) // 2, (height - new_height) // 2))
    return padded


def _check_grids(grids: Sequence[Sequence[int]], tile: int, base: bool) -> None:
    if not grids and not base:
        raise ValueError(f"grids={grids!r} with base=False shows the encoder nothing; list a grid, or set base=True")
    for number, grid in enumerate(grids):
        height, width = _pair(number, grid)
        if height % tile or width % tile:
            raise ValueError(f"grids[{number}]={(height, width)}: each side must be a multiple of tile={tile}; choose whole tiles")


def _pair(number: int, grid: Sequence[int]) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or isinstance(grid, str) or len(grid) != 2:
        raise ValueError(f"grids[{number}]={grid!r} must be a height and a width in pixels; write a pair such as [336, 672]")
    return whole(f"grids[{number}] height", grid[0], 1), whole(f"grids[{number}] width", grid[1], 1)

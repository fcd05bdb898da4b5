"""Where files of published measurements lie, if they do: PUBLISHED_RUNS names the folder, ../shared/published is the default."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("PUBLISHED_RUNS", Path(__file__).resolve().parents[3] / "shared" / "published"))


def published(name):
    """The path of a file; the test is skipped without it."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set PUBLISHED_RUNS to a folder with measured runs")
    return path

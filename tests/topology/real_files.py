"""Where real cluster files lie, if they do: REAL_TOPOLOGY names the folder, ../shared/topology beside the checkout is the default."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("REAL_TOPOLOGY", Path(__file__).resolve().parents[3] / "shared" / "topology"))


def real(name):
    """The path of a real file; the test is skipped without it."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set REAL_TOPOLOGY to a folder with the files of NVIDIA/topograph's tests")
    return path

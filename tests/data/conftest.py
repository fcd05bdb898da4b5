"""One cache folder for all data tests."""

from pathlib import Path

import pytest

from lightning_megascale.data.quickstart import prepare_text


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the quickstart text with the default parameters."""
    folder = tmp_path_factory.mktemp("cache")
    prepare_text(folder)
    return folder

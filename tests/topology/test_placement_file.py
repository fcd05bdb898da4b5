"""A placement as a file: it comes back as it went, the strategy reads it, and a line that is no rank is named."""

import pytest

from lightning_megascale import MegascaleStrategy
from lightning_megascale.topology.placement_file import read_placement, write_placement


def test_it_comes_back_and_the_strategy_takes_it(tmp_path):
    write_placement([0, 2, 1, 3], tmp_path / "ranks.txt", ("a comment",))
    assert (tmp_path / "ranks.txt").read_text().startswith("# a comment\n0\n2\n")
    assert read_placement(tmp_path / "ranks.txt") == [0, 2, 1, 3]
    for path in (tmp_path / "ranks.txt", str(tmp_path / "ranks.txt")):
        assert MegascaleStrategy(placement=path)._placement == [0, 2, 1, 3]
    assert MegascaleStrategy(placement=[1, 0])._placement == [1, 0]


def test_what_is_no_rank_is_named(tmp_path):
    (tmp_path / "ranks.txt").write_text("0\n1 # fine\n-2\n")
    with pytest.raises(ValueError, match="line 3 is '-2' and must be the number of a rank"):
        read_placement(tmp_path / "ranks.txt")
    with pytest.raises(ValueError, match="cannot be read"):
        MegascaleStrategy(placement=tmp_path / "none.txt")

"""Slurm's hostlists: values, what may not be read, and names that come back as they went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megascale.topology.hostlist import compress, expand


@pytest.mark.parametrize(
    ("hostlist", "names"),
    [
        ("login", ["login"]),
        ("n[001-003,7]", ["n001", "n002", "n003", "n7"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("circe-n[001-002],circe-n[019-020]", ["circe-n001", "circe-n002", "circe-n019", "circe-n020"]),  # a hole between two
        ("rack[1-2]-node[0,2]-ib", ["rack1-node0-ib", "rack1-node2-ib", "rack2-node0-ib", "rack2-node2-ib"]),
        ("[1-2]x,a", ["1x", "2x", "a"]),
        ("switch.2.[1-2]", ["switch.2.1", "switch.2.2"]),
        ("a,a", ["a", "a"]),
    ],
)
def test_expands_in_order(hostlist, names):
    assert expand(hostlist) == names


@pytest.mark.parametrize(
    ("hostlist", "message"),
    [
        ("n[1-3", "a bracket is never closed"),
        ("n1-3]", "brackets must be closed in turn, at character 5"),
        ("n[1,[2]]", "brackets must be closed in turn, at character 5"),
        ("n[]", "must hold numbers and ranges such as 001-016, not ''"),
        ("n[1-]", "not '1-'"),
        ("n[a-c]", "not 'a-c'"),
        ("n[9-3]", "the range 9-3 runs backwards; write 3-9"),
        ("a,,b", "'' is no host's name"),
        ("a, b", "' b' is no host's name"),
        ("", "'' is no host's name"),
        ("n[1-9999999999]", "9999999999 names or more; at most 1000000"),
        ("n[1-2000]-[1-2000]", "4000000 names or more"),
    ],
)
def test_what_is_no_hostlist_is_refused(hostlist, message):
    with pytest.raises(ValueError) as error:
        expand(hostlist)
    assert message in str(error.value) and repr(hostlist) in str(error.value)


@pytest.mark.parametrize(
    ("names", "hostlist"),
    [
        (["n001", "n002", "n003", "n7"], "n[001-003,7]"),
        (["n9", "n10", "n12"], "n[9-10,12]"),
        (["n09", "n10", "n010"], "n[09-10,010]"),
        (["n09", "n010"], "n[09,010]"),
        (["n9", "n10", "n011"], "n[9-10,011]"),
        (["n1"], "n1"),
        (["a1", "b1", "a2"], "a1,b1,a2"),
        (["r1-n1", "r1-n2", "r2-n1"], "r1-n[1-2],r2-n1"),
        ([], ""),
    ],
)
def test_compresses_runs_over_the_last_number(names, hostlist):
    assert compress(names) == hostlist


def test_a_name_that_no_hostlist_can_hold_is_refused():
    with pytest.raises(ValueError, match=r"name='a,b': a host's name must not"):
        compress(["a,b"])


@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{0,3}(-[0-9]{1,3})?", fullmatch=True).filter(bool), min_size=1, max_size=30))
def test_any_names_come_back(names):
    assert expand(compress(names)) == names


@given(st.text(alphabet="ab019[],-", max_size=20))
def test_any_text_is_read_or_refused(text):
    try:
        names = expand(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert expand(compress(names)) == names

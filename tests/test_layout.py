"""Layouts: matching, messages, blocks found without a layout, and a guess that can be pasted."""

import subprocess
import sys

import pytest
from torch import nn

from lightning_megascale.layout import ModelLayout, guess_layout, matches, repeated_blocks
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.layouts import describe


@pytest.mark.parametrize(
    "name, pattern, expected",
    [
        ("layers.0.attn", "layers.*.attn", True),
        ("layers.0.attn.q", "layers.*.attn", False),
        ("layers.attn", "layers.*.attn", False),
        ("layers.10.attn", "layers.1*.attn", False),  # a star stands for a whole part
        ("head", "head", True),
    ],
)
def test_a_star_is_exactly_one_part(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_resolve_gives_module_order_and_lists_every_dead_pattern() -> None:
    names = ["", "layers.1.up", "layers.0.up", "head"]
    assert ModelLayout(colwise="layers.*.up").resolve(names)["colwise"] == ("layers.1.up", "layers.0.up")
    with pytest.raises(ValueError) as caught:
        ModelLayout(colwise="layers.*.upp", head="heads").resolve(names)
    assert "layout.colwise: pattern 'layers.*.upp'" in str(caught.value) and "layout.head: pattern 'heads'" in str(caught.value)
    assert "the nearest name is 'head'" in str(caught.value)


def test_an_unknown_role_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="no role 'atention'; did you mean 'attention'"):
        ModelLayout.from_dict({"atention": "a"})


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(experts))


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    return repeated_blocks(describe(model))


def test_repeated_blocks_are_found_in_lists_and_dicts_and_the_outermost_wins() -> None:
    assert blocks_of(nn.ModuleDict({"net": nn.ModuleList(Block(2) for _ in range(3))})) == ("net.0", "net.1", "net.2")
    assert blocks_of(nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": Block(), "b": Block()}))) == ("1.a", "1.b")


def test_plain_layers_in_a_row_are_no_blocks() -> None:
    assert blocks_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ()


def test_two_towers_are_both_found() -> None:
    towers = nn.ModuleDict({name: nn.ModuleList(Block() for _ in range(2)) for name in ("image", "text")})
    assert blocks_of(towers) == ("image.0", "image.1", "text.0", "text.1")


def test_the_guess_for_our_decoder_is_its_layout_where_names_tell() -> None:
    model = Decoder(PRESETS["tiny"])
    guess, own = guess_layout(describe(model)), model.megascale_layout
    for role in ("blocks", "attention", "mlp", "rowwise", "head"):
        assert set(getattr(guess, role)) == set(getattr(own, role)), role
    assert set(own.colwise) == set(guess.colwise)
    assert set(own.norms) == set(guess.norms)
    assert eval(guess.paste()) == guess  # ready to paste


def test_the_floors_without_torch_load_no_torch() -> None:
    code = "import lightning_megascale, lightning_megascale.plan, lightning_megascale.layout, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

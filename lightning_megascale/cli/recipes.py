"""``megascale recipes``: every recipe with the first line of what its file says about it."""

import sys
from pathlib import Path

from lightning_megascale.cli.config import RECIPES, recipe_files
from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE


def summary(file: Path) -> str:
    """The first comment line of a recipe file."""
    first = file.read_text().partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def main() -> None:
    """The verb."""
    arguments = sys.argv[1:]
    if arguments:
        asked = arguments[0] in ("-h", "--help")
        usage = "usage: megascale recipes\n\nLists the recipes. Run one with: megascale train recipe=NAME"
        print(usage, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else USER_ERROR_EXIT_CODE)
    files = recipe_files(RECIPES)
    width = max(map(len, files)) + 2
    for name, file in files.items():
        print(f"  {name:<{width}}{summary(file)}")
    print("\nmegascale train recipe=NAME [key=value ...]; own recipes: recipe=NAME --config-dir FOLDER")

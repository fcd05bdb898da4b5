"""``megascale VERB [recipe=NAME] [key=value ...]``: picks the verb's module and hands it the rest. No torch here."""

import os
import sys
from importlib import import_module

VERBS = {
    "train": "train a recipe; starts its own ranks when nobody else did",
    "plan": "search the best parallel plan of a model on a cluster",
    "verify": "prove on your own model that a plan gives the numbers of one device",
    "dryrun": "run a plan of any size on ranks that do not exist, for its bytes, FLOPs and messages",
    "checkpoint": "list, check, reshard and export checkpoints",
    "data": "index, lint, preview, count and write the shards that a run reads",
    "recipes": "list the recipes",
}


def usage() -> str:
    """The list of verbs."""
    lines = [f"  {verb:<12}{text}" for verb, text in VERBS.items()]
    return (
        "usage: megascale VERB [key=value ...]\n\n"
        + "\n".join(lines)
        + "\n\n  megascale train                          trains the quickstart on this machine"
        + "\n  megascale train --help                   every group and key of a run"
        + "\n  megascale --version\n"
        + '\nTab completion: eval "$(megascale -sc install=bash)"'
    )


def _completion(arguments: list[str]) -> list[str]:
    """Answers a shell's TAB. Hydra's script calls the program without the verb, so it is taken from the typed line.

    Returns:
        The arguments with the verb put first; the verb leaves COMP_LINE, since Hydra knows only overrides.
    """
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    verb, space, rest = rest.lstrip().partition(" ")
    if not space:  # still typing the verb
        print(" ".join(known for known in VERBS if known.startswith(verb)))
        raise SystemExit(0)
    if verb != "train":  # the only verb with Hydra's keys
        raise SystemExit(0)
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return [verb, *arguments]


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-sc"], ["--shell-completion"]):
        arguments = _completion(arguments) if arguments[1:] and arguments[1].startswith("query=") else ["train", *arguments]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    verb, *rest = arguments
    if verb in ("--version", "-V"):
        from lightning_megascale import __version__

        print(f"megascale {__version__}")
        return
    if verb not in VERBS:
        from lightning_megascale.cli.errors import nearest

        what = f"{verb!r} is no verb{nearest(verb, VERBS)}"
        if "=" in verb:
            what = f"a verb comes first: megascale train {' '.join(arguments)}"
        print(f"megascale: {what}\n\n{usage()}", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = ["megascale", *rest]  # what Hydra parses
    try:
        import_module(f"lightning_megascale.cli.{verb}").main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

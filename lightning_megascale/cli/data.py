"""``megascale data index | lint | preview | stats | write``: looks at shards, and makes them, without a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from lightning_megascale.cli.arguments import choice, flag, number, parse
from lightning_megascale.cli.data_sets import ENCODING_KEYS, SOURCE_KEYS, Mix, ShardSet, encoding_options, is_mix, read_mix, shard_sets
from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, nearest

USAGE = """megascale data VERB PATH ...      PATH: a shard, a pattern ('train-{000..009}.tar', 's3://bucket/*.tar'), a folder, or several

  index PATH... [tokenizer=DIR] [processes=N]
                                builds the indexes that a run would build at its start, and with a tokenizer the token counts
  lint PATH... [format=table|json] [processes=N]
                                reads every byte: damaged tars, duplicate keys, missing fields, broken pictures, odd names;
                                exit code 0 when nothing is found, 1 when something is, 2 for wrong use
  preview PATH... or MIX.yaml out=preview.html [tokenizer=DIR] [count=12] [rows=4] [position=0]
                                samples, and with a tokenizer their labels and packed rows, as one .html or .png
  stats PATH... or MIX.yaml [tokenizer=DIR] [out=stats.png] [samples=100000] [ranks=8] [processes=N]
                                of shards: counts, sizes, lengths, pictures; of a mix, for each stage: wanted and drawn shares and their
                                bound, epochs, tokens, padding, opened shards (samples: looked at of a stage without end)
  write INPUT OUT [per_shard=1000] [image_folder=DIR] [prefix=samples] [threads=0]
                  [preprocessed=true tokenizer=DIR image_size=336 pixels=npy|png|jpg]
                                shards from a folder (1.jpg with 1.txt or 1.json) or a LLaVA-style .json or .jsonl

MIX.yaml holds sources: {NAME: {urls, fields, encode}}, perhaps stages, and arguments of the data module; or is a recipe with data.sources.
How tokens are counted: tokenizer, sequence_length=2048, image_size=336, image_patch=14, image_merge=1, image_extra=0,
image_mode=clip|siglip, image_token=<image>.
Where fields have unusual names: fields='{text: cap}'. Own encoders: encode=module.function. cache_dir=DIR"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 2 after a user's mistake (one message), 1 when damage is found.

    Args:
        arguments: what follows ``megascale data``; None: this process's command line, which then also ends with the code.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and code:
        raise SystemExit(code)
    return code


def _run(arguments: list[str]) -> int:
    console = Console()
    try:
        verb, *rest = arguments or ["help"]
        if {"--help", "-h"} & {verb, *rest[:1]} or verb == "help":
            console.print(USAGE, highlight=False, markup=False, soft_wrap=True)
            return 0
        if verb not in _VERBS:
            raise UserError(f"data has no verb {verb!r}{nearest(verb, _VERBS)}; verbs: {', '.join(_VERBS)}")
        run, positional, keys = _VERBS[verb]
        return run(console, parse("data", verb, rest, positional, keys))
    except (ValueError, OSError) as error:  # OSError: a full disk, a folder that may not be read
        if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
            raise
        Console(stderr=True, soft_wrap=True).print(f"megascale: {error}", highlight=False, markup=False)
        return USER_ERROR_EXIT_CODE


def _processes(values: dict[str, Any]) -> int | None:
    return number("processes", values["processes"], int, 1) if "processes" in values else None


def _sets(values: dict[str, Any]) -> list[ShardSet]:
    if is_mix(values["path"]):
        raise UserError(f"{values['path'][0]}: this verb reads shards; give the urls of the sources in it")
    return shard_sets(values["path"], values.get("fields"), values.get("encode"))


def _mix_of(values: dict[str, Any], options: dict[str, Any]) -> Mix | None:
    """The mix that a YAML file holds; None for shards."""
    if not is_mix(values["path"]):
        return None
    given = [key for key in ("fields", "encode") if key in values]
    if given:
        raise UserError(f"{given[0]} is written in {values['path'][0]}, with each source")
    return read_mix(values["path"][0], options)


def _index(console: Console, values: dict[str, Any]) -> int:
    options = encoding_options(values)
    sets = _sets(values)
    from lightning_megascale.cli.data_index import index

    return index(console, sets, options, _processes(values))


def _lint(console: Console, values: dict[str, Any]) -> int:
    as_json = choice("format", values.get("format", "table"), ("table", "json")) == "json"
    processes, sets = _processes(values), _sets(values)
    from lightning_megascale.cli.data_lint import lint

    return lint(console, sets, as_json, processes, values.get("cache_dir"))


def _preview(console: Console, values: dict[str, Any]) -> int:
    out = values.get("out", "preview.html")
    if not out.lower().endswith((".html", ".png")):
        raise UserError(f"out={out}: must end in .html or .png")
    count, rows, position = (number(key, values.get(key, default), int, 0) for key, default in _PREVIEW.items())
    options = encoding_options(values)
    mix = _mix_of(values, options)
    sets = [] if mix is not None else _sets(values)
    from lightning_megascale.cli.data_preview import mix_to_preview, preview

    return preview(console, mix if mix is not None else mix_to_preview(sets, options), out, count, rows, position)


def _stats(console: Console, values: dict[str, Any]) -> int:
    out = values.get("out")
    if out is not None and not out.lower().endswith((".png", ".svg", ".pdf")):
        raise UserError(f"out={out}: must end in .png, .svg or .pdf")
    samples, ranks = (number(key, values.get(key, default), int, 1) for key, default in (("samples", "100000"), ("ranks", "8")))
    options, processes = encoding_options(values), _processes(values)
    mix = _mix_of(values, options)
    if mix is not None:
        from lightning_megascale.cli.data_mix import stats_of_mix

        return stats_of_mix(console, mix, samples, ranks, out)
    sets = _sets(values)
    from lightning_megascale.cli.data_stats import stats_of_shards

    return stats_of_shards(console, sets, options, processes, out)


def _write(console: Console, values: dict[str, Any]) -> int:
    options = encoding_options(values)
    preprocessed = flag("preprocessed", values.get("preprocessed", "false"))
    encoding = [key for key in (*ENCODING_KEYS, "pixels") if key in values]
    if encoding and not preprocessed:
        raise UserError(f"{encoding[0]}={values[encoding[0]]} is for preprocessed=true: add that, or leave it out")
    per_shard, threads = number("per_shard", values.get("per_shard", "1000"), int, 1), number("threads", values.get("threads", "0"), int, 0)
    pixels: Any = choice("pixels", values.get("pixels", "npy"), ("npy", "png", "jpg"))
    from lightning_megascale.cli.data_index import write

    return write(
        console,
        values["input"],
        values["out"],
        options,
        per_shard=per_shard,
        preprocessed=preprocessed,
        pixels=pixels,
        prefix=values.get("prefix", "samples"),
        image_folder=values.get("image_folder"),
        threads=threads,
    )


_PREVIEW = {"count": "12", "rows": "4", "position": "0"}
_READ = (*SOURCE_KEYS, *ENCODING_KEYS)
_VERBS: dict[str, tuple[Callable[[Console, dict[str, Any]], int], tuple[str, ...], tuple[str, ...]]] = {
    "index": (_index, ("PATH...",), (*_READ, "processes")),
    "lint": (_lint, ("PATH...",), (*SOURCE_KEYS, "format", "processes")),
    "preview": (_preview, ("PATH...",), (*_READ, "out", *_PREVIEW)),
    "stats": (_stats, ("PATH...",), (*_READ, "out", "samples", "ranks", "processes")),
    "write": (
        _write,
        ("INPUT", "OUT"),
        ("per_shard", "image_folder", "prefix", "threads", "preprocessed", "pixels", "cache_dir", *ENCODING_KEYS),
    ),
}

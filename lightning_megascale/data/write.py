"""Writes WebDataset shards from a folder or a LLaVA-style file: as the files are, or tokenized and resized so that it is done once."""

from __future__ import annotations

import collections
import concurrent.futures
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import webdataset as wds
from PIL import Image

from lightning_megascale.data import images
from lightning_megascale.data.conversation import IGNORED
from lightning_megascale.data.encode import EncodeContext, encode_sample
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.records import CONVERSATION_FILES, Record, read_folder, read_records
from lightning_megascale.data.shards import token_dtype
from lightning_megascale.data.turns import IMAGE, read_turns, to_messages

Pixels = Literal["npy", "png", "jpg"]
_QUALITY = 95  # of JPEG files that are encoded again
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass
class Written:
    """What was written, and what was left out: (key, file) of missing files, (key, reason) of bad samples."""

    shards: list[Path] = field(default_factory=list)
    samples: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


def write_samples(
    source: str | Path,
    out: str | Path,
    *,
    image_folder: str | Path | None = None,
    samples_per_shard: int = 1000,
    preprocessed: bool = False,
    context: EncodeContext | None = None,
    pixels: Pixels = "npy",
    prefix: str = "samples",
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Writes ``{prefix}-000000.tar`` and so on, and ``{prefix}.json``, which says what was left out; equal input gives equal bytes.

    A **folder**: files of the same name are a sample (``cats/1.jpg`` with ``cats/1.txt`` or ``cats/1.json``). A **.json or .jsonl**
    file: a list of, or lines with, ``conversations`` and ``image`` (a name, a list of them, or none), as LLaVA's; keys are the
    numbers of the records. A sample whose picture is missing, or cannot be read, is left out and listed.

    Raw shards keep pictures as they are, under the extension of their real format. **Preprocessed** ones hold the fields of
    ``encode_sample``: ``tokens.npy``, ``spans.npy`` (labels), and pictures resized, as ``pixels.npy`` or files, with ``sizes.npy``.
    They give the very same batches as raw ones under the same context (with ``pixels="jpg"`` nearly so), and under no other.

    Args:
        source: folder or file.
        out: folder for the shards; made if missing.
        image_folder: where the names in a file lead to; None means the file's own folder.
        samples_per_shard: at most so many, and at most 3 GB.
        preprocessed: whether to encode now.
        context: for encoding; its ``sequence_length`` cuts.
        pixels: "npy" (no decoding later; 3 S^2 bytes), "png" (lossless, smaller) or "jpg" (smallest, quality 95, not exact).
        prefix: of the names; letters, digits, "_" and "-".
        threads: that read and encode; 0 does it in this one.
        progress: called with the number of records done, each time one is.

    Raises:
        ValueError: for arguments, names with dots, two texts or pictures of one name, or shards that are there already.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    _check(source, out, samples_per_shard, preprocessed, context, pixels, prefix)
    records = read_folder(source) if source.is_dir() else read_records(source, Path(image_folder or source.parent).expanduser())
    out.mkdir(parents=True, exist_ok=True)
    report = Written()
    pattern = str(out / prefix).replace("%", "%%") + "-%06d.tar"

    def prepare(record: Record) -> dict[str, Any] | tuple[str, str] | BadSample:
        for path in (*record.pictures, *([record.text] if isinstance(record.text, Path) else [])):
            if not path.is_file():
                return record.key, str(path)
        try:
            sample = _raw(record)
            return _preprocess(sample, context, pixels) if preprocessed and context is not None else sample
        except BadSample as error:
            return error

    try:
        with wds.ShardWriter(pattern, maxcount=samples_per_shard, verbose=0, mtime=0) as writer:
            for number, (record, sample) in enumerate(_in_order(prepare, records, threads), 1):
                if isinstance(sample, tuple):
                    report.missing.append(sample)
                elif isinstance(sample, BadSample):
                    report.bad.append((record.key, str(sample)))
                else:
                    writer.write(_members(record.key, sample))
                    report.samples += 1
                if progress is not None:
                    progress(number)
        if not report.samples:
            raise ValueError(f"{source}: no sample could be written; {_first_reason(report)}")
    except BaseException:
        for shard in out.glob(f"{prefix}-*.tar"):  # there were none before: a part of the samples is no result
            shard.unlink()
        raise
    report.shards = sorted(out.glob(f"{prefix}-*.tar"))
    _write_report(out / f"{prefix}.json", report, preprocessed, context, pixels)
    return report


def _check(
    source: Path, out: Path, samples_per_shard: int, preprocessed: bool, context: EncodeContext | None, pixels: str, prefix: str
) -> None:
    rules = [
        (source.exists(), f"source {str(source)!r} does not exist; give a folder, or a .json or .jsonl file"),
        (samples_per_shard >= 1, f"samples_per_shard={samples_per_shard}: at least 1"),
        (preprocessed == (context is not None), f"preprocessed={preprocessed}: a context comes with preprocessed=True, and only then"),
        (pixels in ("npy", "png", "jpg"), f"pixels={pixels!r}: npy, png or jpg"),
        (_NAME.fullmatch(prefix) is not None, f"prefix={prefix!r}: letters, digits, '_' and '-'"),
        (
            not any(out.glob(f"{prefix}-*.tar")) if _NAME.fullmatch(prefix) else True,
            f"out {str(out)!r} holds shards {prefix}-*.tar already: delete them, or choose another folder or prefix",
        ),
    ]
    wrong = [message for holds, message in rules if not holds]
    if wrong:
        raise ValueError("\n".join(wrong))


def _in_order(
    function: Callable[[Record], Any], records: Iterable[Record], threads: int
) -> Iterator[tuple[Record, dict[str, Any] | tuple[str, str] | BadSample]]:
    """Results in the order of the records; a few records per thread are in work or waiting, never all."""
    if not threads:
        yield from ((record, function(record)) for record in records)
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        remaining = iter(records)
        waiting = collections.deque((record, pool.submit(function, record)) for record in itertools.islice(remaining, 4 * threads))
        while waiting:
            record, future = waiting.popleft()
            yield record, future.result()
            waiting.extend((record, pool.submit(function, record)) for record in itertools.islice(remaining, 1))


def _raw(record: Record) -> dict[str, Any]:
    """The sample's fields as bytes, as a source reads them; what is plainly bad is found without decoding a picture."""
    sample: dict[str, Any] = {"__key__": record.key}
    if record.text is None:
        raise BadSample("a picture without text; write it into a file of the same name, .txt for a caption or .json for a conversation")
    text = record.text.read_bytes() if isinstance(record.text, Path) else record.text
    sample["conversation" if record.extension in CONVERSATION_FILES else "text"] = text
    if record.extension in CONVERSATION_FILES:
        found = sum(message["content"].count(IMAGE) for message in to_messages(read_turns(text)))
        if found != len(record.pictures):
            raise BadSample(f"the text has {found} {IMAGE} for {len(record.pictures)} pictures")
    if record.pictures:
        sample["images"] = [picture.read_bytes() for picture in record.pictures]
        for data in sample["images"]:
            images.size_of(data)
    return sample


def _preprocess(sample: dict[str, Any], context: EncodeContext, pixels: Pixels) -> dict[str, Any]:
    """The sample encoded, as the fields that ``encode_sample`` takes back."""
    encoded = encode_sample(sample, context)
    ids, labels = encoded["input_ids"].numpy(), encoded["labels"].numpy()
    result: dict[str, Any] = {"tokens": ids.astype(token_dtype(len(context.tokenizer)))}
    edges = np.flatnonzero(np.diff(np.concatenate(([False], labels != IGNORED, [False])).astype(np.int8)))
    result["spans"] = edges.reshape(-1, 2).astype(np.int32)
    if "pixel_values" in encoded:
        values = encoded["pixel_values"].numpy()
        result["sizes"] = encoded["image_sizes"].numpy().astype(np.int32)
        if pixels == "npy":
            result["pixels"] = values
        else:
            result["images"] = [_file(picture, pixels) for picture in values.transpose(0, 2, 3, 1)]
    return result


def _file(picture: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"quality": _QUALITY, "subsampling": 0} if kind == "jpg" else {}
    Image.fromarray(picture).save(buffer, {"jpg": "JPEG", "png": "PNG"}[kind], **options)
    return buffer.getvalue()


def _members(key: str, sample: dict[str, Any]) -> dict[str, Any]:
    """The sample under the extensions of ``source_config.DEFAULT_FIELDS``."""
    members: dict[str, Any] = {"__key__": key}
    for name, extension in (("text", "txt"), ("conversation", "json"), ("tokens", "tokens.npy"), ("spans", "spans.npy")):
        if name in sample:
            members[extension] = sample[name]
    for name in ("pixels", "sizes"):
        if name in sample:
            members[f"{name}.npy"] = sample[name]
    pictures = sample.get("images", [])
    for number, data in enumerate(pictures):
        extension = images.format_of(data)
        members[extension if len(pictures) == 1 else f"{number}.{extension}"] = data
    return members


def _first_reason(report: Written) -> str:
    if report.missing:
        key, name = report.missing[0]
        return f"{len(report.missing)} files are missing, the first is {name!r} of {key!r}: set image_folder"
    return f"{len(report.bad)} are bad, the first is {report.bad[0][0]!r}: {report.bad[0][1]}" if report.bad else "there is none"


def _write_report(path: Path, report: Written, preprocessed: bool, context: EncodeContext | None, pixels: str) -> None:
    content: dict[str, Any] = {
        "shards": [shard.name for shard in report.shards],
        "samples": report.samples,
        "missing": report.missing,
        "bad": report.bad,
        "preprocessed": {"identity": context.identity(), "pixels": pixels} if preprocessed and context is not None else None,
    }
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)

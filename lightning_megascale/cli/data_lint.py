"""``megascale data lint``: reads every byte of every shard and lists what a run would stop at, replace or silently read otherwise."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_megascale.cli.arguments import many, size
from lightning_megascale.cli.data_checks import CHECKS, files_of
from lightning_megascale.cli.data_sets import ShardSet
from lightning_megascale.cli.data_work import each
from lightning_megascale.data import images
from lightning_megascale.data.columns import read_header
from lightning_megascale.data.expand import local_path, shown
from lightning_megascale.data.index import ShardIndex, index_path, open_index
from lightning_megascale.data.index_build import key_and_field
from lightning_megascale.data.quarantine import BadSample
from lightning_megascale.data.records import IMAGE_FILES
from lightning_megascale.data.source_config import OPTIONAL_FIELDS, default_fields
from lightning_megascale.data.storage import ShardStore
from lightning_megascale.data.tar_walk import Member, ShardError, TarWalk

SHOWN = 100  # findings in the table


@dataclass(frozen=True)
class Finding:
    """Something wrong: the shard, the sample's key (None: of the whole shard), the byte of its tar header, and why."""

    shard: str
    key: str | None
    offset: int | None
    reason: str


@dataclass(frozen=True)
class Job:
    """A shard to read, and the fields that its set has; without ``default`` an encode function of one's own reads them."""

    url: str
    fields: Mapping[str, str]
    default: bool
    cache_dir: str | None


@dataclass
class Report:
    """What is in a shard, and what is wrong with it."""

    samples: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Sample:
    """The members of one sample so far."""

    key: str
    row: int
    offset: int
    members: dict[str, Member] = field(default_factory=dict)


def lint(console: Console, sets: Sequence[ShardSet], as_json: bool, processes: int | None, cache_dir: str | None) -> int:
    """Reads the shards of all sets and prints what is wrong with them.

    Returns:
        0 for nothing, 1 for something.
    """
    jobs: list[Job] = []
    findings: list[Finding] = []
    for shards in sets:
        fields, problem = _fields_of(shards, cache_dir)
        findings += [problem] if problem else []
        jobs += [Job(url, fields, shards.encode is None, cache_dir) for url in shards.urls]
    reports = each(lint_shard, jobs, processes, "reading shards")
    findings += [finding for report in reports for finding in report.findings]
    samples, read = sum(report.samples for report in reports), sum(report.bytes for report in reports)
    if as_json:
        content = {"shards": len(jobs), "samples": samples, "bytes": read, "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        _show(console, findings, len(jobs), samples, read)
    return 1 if findings else 0


def _show(console: Console, findings: Sequence[Finding], shards: int, samples: int, read: int) -> None:
    what = f"{many(shards, 'shard')}, {many(samples, 'sample')}, {size(read)}"
    if not findings:
        console.print(f"{what}: nothing found", highlight=False)
        return
    table = Table()
    for title in ("shard", "key", "byte", "what is wrong"):
        table.add_column(title, overflow="fold", justify="right" if title == "byte" else "left")
    for one in findings[:SHOWN]:
        cells = (Path(one.shard).name, one.key or "", "" if one.offset is None else f"{one.offset:,}", one.reason)
        table.add_row(*map(Text, cells))
    console.print(table)
    if len(findings) > SHOWN:
        console.print(f"and {len(findings) - SHOWN:,} more: format=json lists all", highlight=False)
    bad = len({one.shard for one in findings})
    console.print(f"{what}: {many(len(findings), 'finding')} in {many(bad, 'shard')}", highlight=False)


def _fields_of(shards: ShardSet, cache_dir: str | None) -> tuple[dict[str, str], Finding | None]:
    """The fields of a set as a run finds them: those given, or what the shards have that can be read at all."""
    if shards.fields is not None:
        return dict(shards.fields), None
    extensions: dict[str, None] = {}
    for url in shards.urls:
        with open(_local(url, cache_dir), "rb") as file:
            walk = _Walk(file, crc=False)
            try:
                for member in walk.members():
                    parts = key_and_field(member, walk)
                    extensions |= {parts[1]: None} if parts else {}
            except ShardError:
                pass  # listed when the shard is read
    if not extensions:
        return {}, None
    try:
        return default_fields(list(extensions)), None
    except ValueError as error:
        return {}, Finding(shown(shards.urls[0]), None, None, str(error))


def _local(url: str, cache_dir: str | None) -> Path:
    return ShardStore(cache_dir).local(url)


class _Walk(TarWalk):
    """A walk that keeps every remark with its byte, and says what is wrong without the shard's name."""

    def __init__(self, file: BinaryIO, crc: bool) -> None:
        super().__init__(file, "", crc=crc)
        self.remarks: list[tuple[int, str]] = []

    def note(self, offset: int, text: str) -> None:
        self.remarks.append((offset, text))

    def error(self, text: str, offset: int) -> ShardError:
        return ShardError(f"after {self.samples:,} samples: {text}", "", offset, self.samples)


def lint_shard(job: Job) -> Report:
    """Reads one shard to its end, or to the damage after which nothing in it can be told apart."""
    path, name, report = _local(job.url, job.cache_dir), shown(job.url), Report()
    index, known = _known(path, job.cache_dir) if local_path(job.url) is not None else (None, 0)
    with open(path, "rb") as file:
        walk = _Walk(file, crc=False)
        linter = _Linter(job, name, file.fileno(), index, report)
        damaged = False
        try:
            for member in walk.members():
                parts = key_and_field(member, walk)
                if parts is not None:
                    linter.add(member, *parts)
                    walk.samples = report.samples
        except ShardError as error:
            damaged = True
            report.findings.append(Finding(name, None, error.offset, str(error)))
        linter.finish(whole=not damaged)
        report.findings += [Finding(name, None, offset, text) for offset, text in walk.remarks]
        report.bytes = walk.position
    if not damaged and not report.samples:
        report.findings.append(Finding(name, None, None, "no samples: a sample's files are named KEY.FIELD, as 000001.jpg and 000001.txt"))
    elif not damaged and known > report.samples:
        lost = f"had {known:,} samples when it was indexed, and has {report.samples:,} now: fetch it again, or index it if that is right"
        report.findings.append(Finding(name, None, None, lost))
    report.findings.sort(key=lambda one: -1 if one.offset is None else one.offset)
    return report


def _known(path: Path, cache_dir: str | None) -> tuple[ShardIndex | None, int]:
    """The shard's current index if it has one, and how many samples any index of it, current or not, knew."""
    header = read_header(index_path(path, cache_dir))
    try:
        index = open_index(path, cache_dir, build=False)
    except (ValueError, OSError):
        index = None
    return index, int((header or {}).get("samples", 0))


class _Linter:
    """Puts members together to samples and looks at each."""

    def __init__(self, job: Job, name: str, descriptor: int, index: ShardIndex | None, report: Report) -> None:
        self.job, self.name, self.descriptor, self.index, self.report = job, name, descriptor, index, report
        self.sample: Sample | None = None
        self.seen: set[str] = set()

    def add(self, member: Member, key: str, extension: str) -> None:
        if self.sample is None or key != self.sample.key:
            self.finish()
            if key in self.seen:
                self._found(key, member.header, "duplicate key: its files are not neighbours, or two samples have one key")
            self.seen.add(key)
            self.sample = Sample(key, self.report.samples, member.header)
            self.report.samples += 1
        if extension in self.sample.members:
            self._found(key, member.header, f"duplicate: the sample has the field {extension!r} twice")
        self.sample.members[extension] = member

    def finish(self, whole: bool = True) -> None:
        """Looks at the sample whose last member has come; or of which damage has hidden the rest."""
        sample, self.sample = self.sample, None
        if sample is None:
            return
        data = {extension: self._read(member) for extension, member in sample.members.items()}
        for extension, member in sample.members.items():
            self._compare(sample, extension, member, data[extension])
            if extension.rpartition(".")[2] in IMAGE_FILES:
                self._try(sample, member.header, f"{extension}: ", images.decode, data[extension])
        if not whole:
            return
        fields = {name: files_of(data, name, extensions) for name, extensions in self.job.fields.items()}
        for name in (name for name, found in fields.items() if not found and name not in OPTIONAL_FIELDS):
            has = ", ".join(sample.members)
            self._found(sample.key, sample.offset, f"the field {name!r} ({self.job.fields[name]}) is missing; the sample has {has}")
        if self.job.default:
            self._contents(sample, {name: found for name, found in fields.items() if found})

    def _read(self, member: Member) -> bytes:
        data = bytearray()
        while piece := os.pread(self.descriptor, member.size - len(data), member.offset + len(data)):
            data += piece
        return bytes(data)

    def _compare(self, sample: Sample, extension: str, member: Member, data: bytes) -> None:
        if self.index is None or sample.row >= self.index.samples or self.index.key(sample.row) != sample.key:
            return
        expected = self.index.crc32(sample.row, extension)
        if expected is not None and zlib.crc32(data) != expected:
            self._found(sample.key, member.header, f"{extension}: its bytes are not those that were indexed (CRC-32): restore the shard")

    def _contents(self, sample: Sample, fields: dict[str, list[bytes]]) -> None:
        """What the default encoder would refuse, apart from what only a tokenizer knows."""
        pictures = len(fields.get("image", fields.get("images", [])))
        for name, check in CHECKS.items():
            if name in fields:
                whole = {other: found[0] for other, found in fields.items()}
                self._try(sample, sample.offset, "", check, whole, pictures)

    def _try(self, sample: Sample, offset: int, where: str, check: Any, *given: Any) -> None:
        try:
            check(*given)
        except BadSample as error:
            self._found(sample.key, offset, f"{where}{error}")

    def _found(self, key: str, offset: int, reason: str) -> None:
        self.report.findings.append(Finding(self.name, key, offset, reason))

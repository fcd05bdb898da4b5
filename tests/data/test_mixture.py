"""MixtureDataModule: one order for every number of ranks and workers, exact resumes, stages kept, bad samples replaced, nothing lost."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_megascale.data.mixture import MixtureDataModule
from tests.data.mixes import QUIET, SIZES, STAGES, OnRank, Recorder, joined, module, run, sources, write
from tests.harness import run_ranks

TOTAL = 64 + 96 + 96


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return sources(tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def made(urls: dict[str, str], tmp_path: Path) -> Any:
    return lambda **options: module(options.pop("urls", urls), tmp_path, options.pop("stages", STAGES), **options)


def keys(data: MixtureDataModule, first: int = 0, count: int = TOTAL) -> list[str]:
    data.prepare_data()
    data.setup()
    assert data.train_stream is not None
    return [data.train_stream.key(position) for position in range(first, first + count)]


# ---- order -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["padded", "packed", "bucketed"])
def test_ranks_and_workers_change_nothing(rows: str, made: Any) -> None:
    """The rows of 1, 2, 4 and 8 ranks, with 0, 1 and 3 workers, are the same, over three stages and a ramp."""
    options = dict(rows=rows, packing_window=32)
    wanted = joined([run(made(batch_size=16, **options))])
    assert len(wanted) >= 48 and len({tuple(row) for row in wanted}) > 40
    for size, workers in ((1, 1), (2, 0), (4, 3), (8, 0)):
        ranks = [run(made(batch_size=16 // size, num_workers=workers if rank == 0 else 0, **options), rank, size) for rank in range(size)]
        assert joined(ranks) == wanted, (size, workers)
        assert len({len(rank.rows) for rank in ranks}) == 1


def test_each_epoch_visits_each_sample_once_and_the_next_in_another_order(made: Any) -> None:
    drawn = keys(made())
    for name, sizes in SIZES.items():
        own, size = [key for key in drawn if key[0] == name], sum(sizes)
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert epochs and all(len(set(epoch)) == size for epoch in epochs), name
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_stages_have_their_shares(made: Any) -> None:
    drawn = keys(made())
    assert Counter(key[0] for key in drawn[:64]) == {"b": 64}
    assert Counter(key[0] for key in drawn[160:]) == {"a": 72, "c": 24}
    plain = Counter(key[0] for key in drawn[96:160])  # behind the ramp: 0.5, 0.3, 0.2
    assert all(abs(plain[name] - 64 * share) <= 2 for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)))


def test_a_source_more_or_less_changes_no_other(made: Any, urls: dict[str, str], tmp_path: Path) -> None:
    stages = [{"name": "all", "until": {"samples": 100}, "mix": {"a": 1, "b": 1}}]
    more = {"0": write(tmp_path / "more", "0", (9,)), **urls}
    wider = [{"name": "all", "until": {"samples": 150}, "mix": {"0": 1, "a": 1, "b": 1}}]
    own, others = keys(made(stages=stages, lanes=1), 0, 100), keys(made(urls=more, stages=wider, lanes=1), 0, 150)
    for name in "ab":
        assert [key for key in own if key[0] == name] == [key for key in others if key[0] == name]


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_stage_more_leaves_what_comes_before(lanes: int, made: Any) -> None:
    mix = {"a": 0.5, "b": 0.3, "c": 0.2}
    endless = keys(made(stages=[{"name": "one", "mix": mix}], lanes=lanes), 0, 150)
    stages = [
        {"name": "one", "until": {"samples": 101}, "mix": mix},
        {"name": "two", "until": {"samples": 99}, "mix": {"a": 1, "b": 1, "c": 2}},
    ]
    assert keys(made(stages=stages, lanes=lanes), 0, 101) == endless[:101]


def test_weights_of_tokens(made: Any, tmp_path: Path) -> None:
    """Long texts and short ones, half of the tokens each: the tokens of every prefix stray by a longest sample at most."""
    both = {"long": write(tmp_path / "t", "long", (40,), (14, 15)), "short": write(tmp_path / "t", "short", (160,), (1, 3))}
    stages = [{"name": "half", "until": {"tokens": 4000}, "mix": {"long": 0.5, "short": 0.5}}]
    data = made(urls=both, stages=stages, weights="tokens", long_documents="truncate")
    data.prepare_data()
    data.setup()
    assert data.schedule.total is not None
    lengths = data.train_stream.lengths(0, data.schedule.total)
    of_long = [key.startswith("long") for key in keys(data, 0, data.schedule.total)]
    tokens = {True: 0, False: 0}
    for is_long, length in zip(of_long, lengths.tolist()):
        tokens[is_long] += length
        assert abs(tokens[True] - tokens[False]) / 2 <= max(lengths), "strays from half of all tokens"
    assert 4000 <= sum(tokens.values()) < 4000 + max(lengths)


def test_a_stage_of_tokens_with_weights_of_samples(made: Any) -> None:
    data = made(stages=[{"name": "one", "until": {"tokens": 1000}, "mix": {"a": 1, "b": 1}}, {"name": "two", "mix": {"c": 1}}], lanes=1)
    data.prepare_data()
    data.setup()
    end = data.schedule.stage_start(1)
    lengths = data.train_stream.lengths(0, end)
    assert lengths.sum() >= 1000 > lengths[:-1].sum()


def test_a_stage_of_steps_follows_the_global_batch(made: Any) -> None:
    stages = [{"name": "one", "until": {"steps": 3}, "mix": {"a": 1}}, {"name": "two", "until": {"steps": 2}, "mix": {"b": 1}}]
    recorder = run(made(stages=stages, batch_size=4))
    assert [{key[0] for row in batch for key in row} for batch in recorder.rows] == [{"a"}] * 3 + [{"b"}] * 2
    with pytest.raises(ValueError, match="until.steps=3, and a step has no known number of samples: with packing give tokens"):
        run(made(stages=stages, rows="packed"))


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_metrics_tell_the_shares_so_far(rows: str, made: Any, tmp_path: Path) -> None:
    data = made(rows=rows, packing_window=32)
    data.prepare_data()
    data.setup()
    data.load_state_dict(
        {"position": data.advance(0, 100 if rows == "padded" else 20), "batches": 0, "global_batch": 2, "data": data.identity}
    )
    told = data.metrics()
    samples = 100 if rows == "padded" else data.packer.span(data.position >> 20)[0] + data.packer.span(data.position >> 20)[1]
    drawn = Counter(key[0] for key in keys(data, 0, samples))
    assert told == {**{f"data/ratio/{name}": drawn[name] / samples for name in "abc"}, "data/quarantined": 0.0}


# ---- rows ------------------------------------------------------------------------------------------------------------------------------


def test_packed_rows_hold_every_sample_once(made: Any) -> None:
    """Each planned sample is in one row, documents are apart, and labels do not cross their borders."""
    data = made(rows="packed", packing_window=32, stages=[{"name": "all", "until": {"samples": 80}, "mix": {"a": 1, "b": 1}}])
    data.prepare_data()
    data.setup()
    batches = list(data.train_dataloader())
    held = [key for batch in batches for row in batch["__key__"] for key in row]
    expected = keys(data, 0, 80)
    assert not Counter(held) - Counter(expected) and len(held) > 70  # the last rows fill no batch
    for batch in batches:
        ids, labels, documents = batch["input_ids"], batch["labels"], batch["document_ids"]
        assert ids.shape == (2, 32) and ((labels == ids) | (labels == -100)).all()
        first = (batch["position_ids"] == 0) & (documents >= 0)
        assert (labels[first] == -100).all() and (labels[documents < 0] == -100).all()
        assert first.sum() == sum(len(row) for row in batch["__key__"])


def test_long_documents_are_cut_and_nothing_is_lost(made: Any, tmp_path: Path) -> None:
    long = {"d": write(tmp_path / "long", "d", (5, 4), (60, 90))}
    data = made(urls=long, stages=[{"name": "d", "mix": {"d": 1}}], lanes=1)
    data.prepare_data()
    data.setup()
    size = data.orders[0].size
    tokens = Counter()  # type: ignore[var-annotated]
    for position in range(size):
        sample = data.train_stream[position]
        assert 1 <= len(sample["input_ids"]) <= 32
        tokens[sample["__key__"]] += len(sample["input_ids"])
    source = data.train_stream.sources[0].source
    whole = {source.key(shard, row): int(source.shard_lengths(shard)[row]) for shard in range(2) for row in range(source.sizes[shard])}
    assert dict(tokens) == whole and max(whole.values()) > 100
    cut = made(urls=long, stages=[{"name": "d", "mix": {"d": 1}}], long_documents="truncate")
    cut.prepare_data()
    cut.setup()
    assert cut.orders[0].size == 9 and len(cut.train_stream[0]["input_ids"]) == 32


def test_bucketed_rows_are_near_others_of_their_length(made: Any) -> None:
    many = dict(stages=[{"name": "b", "until": {"samples": 512}, "mix": {"b": 1}}], batch_size=16, packing_window=512, pad_multiple=1)
    shares = {}
    for rows in ("bucketed", "padded"):
        batches = []
        data = made(rows=rows, **many)
        data.prepare_data()
        data.setup()
        batches = list(data.train_dataloader())
        shares[rows] = sum(1 - float(batch["attention_mask"].double().mean()) for batch in batches) / len(batches)
        assert rows == "bucketed" or {batch["input_ids"].shape for batch in batches} == {(16, 32)}
    assert shares["bucketed"] < shares["padded"] / 4


# ---- resume ----------------------------------------------------------------------------------------------------------------------------


def killed(data: MixtureDataModule, at: int, folder: Path, rank: int = 0, size: int = 1, **options: Any) -> Recorder:
    recorder = Recorder(die_at=at)
    saver = OnExceptionCheckpoint(folder, filename=f"rank{rank}")
    trainer = Trainer(strategy=OnRank(rank, size), callbacks=[saver], max_epochs=1, **{**QUIET, "enable_checkpointing": True}, **options)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(recorder, datamodule=data)
    return recorder


def resumed(data: MixtureDataModule, path: Path, rank: int = 0, size: int = 1) -> Recorder:
    recorder = Recorder()
    Trainer(strategy=OnRank(rank, size), max_epochs=1, **QUIET).fit(recorder, datamodule=data, ckpt_path=path, weights_only=False)
    return recorder


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_killed_and_resumed_under_other_layouts(rows: str, made: Any, tmp_path: Path) -> None:
    """Killed twice at random places and resumed with other ranks, batches and workers: the rows of one whole run, none lost at the end."""
    options = dict(rows=rows, packing_window=32)
    wanted = joined([run(made(batch_size=8, **options))])
    places = random.Random(1)
    for trial in range(5):
        folder = tmp_path / f"{rows}{trial}"
        first, second = places.choice([1, 2, 4, 8]), places.choice([1, 2, 4, 8])
        batches = len(wanted) // 8
        at = places.randrange(1, batches - 1)
        begun = [killed(made(batch_size=8 // first, **options), at, folder, rank, first) for rank in range(first)]
        workers = places.choice([0, 1])
        rest = [
            resumed(made(batch_size=8 // second, num_workers=workers, **options), folder / "rank0.ckpt", rank, second)
            for rank in range(second)
        ]
        assert joined(begun) + joined(rest) == wanted, (trial, first, second, at)


def test_resumed_at_fifty_positions(made: Any) -> None:
    """Simulated: from the state after any number of rows a new module goes on with the next, with other batches and ranks."""
    for rows in ("padded", "packed", "bucketed"):
        data = made(rows=rows, packing_window=32)
        data.prepare_data()
        data.setup()
        every = data.take(0, 1000)
        places = random.Random(2)
        for _ in range(50):
            count = places.randrange(len(every))
            position = data.advance(0, count)
            other = made(rows=rows, packing_window=32, batch_size=places.choice([1, 3, 4]))
            other.setup()
            other.load_state_dict({"position": position, "batches": 0, "global_batch": 2, "data": json.loads(json.dumps(data.identity))})
            assert other.take(other.position, 5) == every[count : count + 5], (rows, count)


def test_a_resume_into_another_batch_size_ends_where_the_run_ends(made: Any, tmp_path: Path) -> None:
    """From few ranks to many and back: Lightning compares its restored count of batches with the loader's length."""
    wanted = joined([run(made(batch_size=4))])
    assert len(wanted) == TOTAL
    for first, second in ((16, 2), (2, 16)):
        begun = killed(made(batch_size=first), 128 // first, tmp_path / f"{first}")
        rest = resumed(made(batch_size=second), tmp_path / f"{first}" / "rank0.ckpt")
        assert joined([begun]) + joined([rest]) == wanted


def test_a_changed_mix_is_refused_unless_as_a_stage(made: Any, tmp_path: Path) -> None:
    killed(made(batch_size=8), 10, tmp_path / "run")  # 80 samples in
    path = tmp_path / "run" / "rank0.ckpt"
    other = [STAGES[0], {"name": "two", "until": {"samples": 176}, "mix": {"a": 1}}]
    with pytest.raises(
        ValueError, match="stages differ from the checkpoint's before its position, 80 samples into the run.*append a stage"
    ):
        resumed(made(batch_size=8, stages=other), path)
    ended = [*STAGES[:1], {**STAGES[1], "until": {"samples": 32}}, {"name": "new", "until": {"samples": 40}, "mix": {"c": 1}}]
    rest = joined([resumed(made(batch_size=8, stages=ended), path)])
    assert len(rest) == 56 and rest[:16] == joined([run(made(batch_size=8))])[80:96] and {row[0][0] for row in rest[16:]} == {"c"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(seed=1), "seed 0 -> 1"),
        (dict(rows="packed"), "rows "),
        (dict(lanes=2), r"order \[16, 4\] -> \[16, 2\]"),
        (dict(sequence_length=16), "encoding "),
    ],
)
def test_another_order_is_refused(changed: dict[str, Any], words: str, made: Any, tmp_path: Path) -> None:
    killed(made(), 5, tmp_path / "run")
    with pytest.raises(ValueError, match=f"position is of other data: .*{words}"):
        resumed(made(**changed), tmp_path / "run" / "rank0.ckpt")


def test_another_shard_is_refused(made: Any, urls: dict[str, str], tmp_path: Path) -> None:
    killed(made(), 5, tmp_path / "run")
    changed = {**urls, "b": write(tmp_path / "other", "b", (30, 25), seed=9)}
    with pytest.raises(ValueError, match="position is of other data: sources "):
        resumed(made(urls=changed), tmp_path / "run" / "rank0.ckpt")


@pytest.mark.parametrize(("first", "second"), [((2, 1, 2), (3, 2)), ((1, 1, 3), (1, 2)), ((2, 2, 4), (1, 4))])
def test_steps_stay_whole_where_the_accumulation_changes(first: Any, second: Any, made: Any, tmp_path: Path) -> None:
    """Given as (batch size, accumulation, batches trained): by its restored count Lightning tells where a step begins."""
    size, accumulated, at = first
    killed(made(batch_size=size), at, tmp_path / "run", accumulate_grad_batches=accumulated)

    class Steps(Recorder):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.__dict__.setdefault("taken", []).append(len(self.rows))

    recorder = Steps()
    options: dict[str, Any] = dict(max_epochs=1, accumulate_grad_batches=second[1], **QUIET)
    path = tmp_path / "run" / "rank0.ckpt"
    Trainer(strategy=OnRank(0, 1), **options).fit(recorder, datamodule=made(batch_size=second[0]), ckpt_path=path, weights_only=False)
    assert recorder.taken == list(range(second[1], len(recorder.rows) + 1, second[1])), "every step takes so many batches, the last one too"
    trained = size * (at // accumulated * accumulated if (size, accumulated) == second else at)
    whole = second[0] * second[1]
    assert len(joined([recorder])) == (TOTAL - trained) // whole * whole


@pytest.mark.parametrize("options", [{"max_epochs": -1, "max_steps": 500}, {"max_epochs": 5}])
def test_a_run_ends_with_its_stages(options: dict[str, int], made: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        recorder = run(made(batch_size=8), **options)
    assert len(joined([recorder])) == TOTAL and recorder.trainer.current_epoch <= 2
    assert f"the stages end here, {TOTAL} samples into the run: for a longer one append a stage" in caplog.text


# ---- ranks -----------------------------------------------------------------------------------------------------------------------------


def _set_up(folders: list[str], name: str) -> str:
    rank = torch.distributed.get_rank()
    data = module({name: f"{folders[rank]}/{name}-*.tar"}, Path(folders[rank]), None)
    try:
        data.setup()
    except Exception as error:  # noqa: BLE001 - compared over ranks
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_ranks_with_other_copies_are_refused(tmp_path: Path) -> None:
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    for folder in folders:
        write(Path(folder), "a", (5, 6))
    assert run_ranks(_set_up, 2, folders, "a") == ["fine", "fine"]
    (tmp_path / "two" / "a-001.tar").unlink()
    for said in run_ranks(_set_up, 2, folders, "a"):
        assert said.startswith("ValueError: ranks 1 and 0 read different data: sources {'a': ")
    for path in (tmp_path / "two").glob("*.tar"):
        path.unlink()
    one, two = run_ranks(_set_up, 2, folders, "a")
    assert one.startswith("ValueError: rank 1 cannot prepare its data: ") and "a-*.tar" in two


# ---- validation ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_validation_reads_each_sample_once(rows: str, made: Any, urls: dict[str, str]) -> None:
    found: Counter[str] = Counter()
    counts = set()
    for rank in range(2):
        data = made(rows=rows, validation={"b": urls["b"], "c": urls["c"]}, batch_size=4)
        recorder = run(data, rank, 2, num_sanity_val_steps=0)
        counts.add(len(recorder.validated))
        for batch in recorder.validated:
            labelled = (batch["labels"] != -100).any(1)
            found += Counter(key for row, is_real in zip(batch["__key__"], labelled) if is_real for key in row)
    assert len(counts) == 1 and set(found) == {f"b{n:04d}" for n in range(55)} | {f"c{n:04d}" for n in range(5)}
    assert set(found.values()) == {1}


@pytest.mark.parametrize("rows", ["packed", "bucketed", "padded"])
def test_an_epoch_without_stages_has_the_rows_of_its_samples(rows: str, tmp_path: Path) -> None:
    """However small the sources are against the samples that are planned together."""
    urls = write(tmp_path, "a", (7, 13))
    data = module({"a": urls}, tmp_path, None, rows=rows, sequence_length=64, batch_size=1)
    seen = keys(data, 0, 40)
    assert sorted(seen[:20]) == sorted(seen[20:]) and len(set(seen[:20])) == 20
    length = len(data.train_dataloader())
    rows_of = data.take(0, length)
    if data.packer is None:
        assert rows_of == list(range(20))
    else:
        assert sorted(position for row in rows_of for position in data.packer.sequence(row)) == list(range(20))


# ---- refusals --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(rows="stacked"), "rows='stacked': must be one of packed, padded, bucketed"),
        (dict(batch_size=0), "batch_size=0: a whole number, at least 1"),
        (dict(sequence_length="32"), "sequence_length='32'"),
        (dict(cache_gigabytes=0), "cache_gigabytes=0: above 0"),
        (dict(stages=[{"name": "one", "mixx": {"a": 1}}]), "did you mean 'mix'"),
        (dict(stages=[{"name": "one", "until": {"epochs": 3}, "mix": {"a": 1}}]), "until={'epochs': 3} must be"),
        (dict(urls={"a": {"url": "x.tar"}}), "source 'a' has url: it is a mapping of urls, fields, encode"),
        (dict(urls={}), "sources: give at least one"),
        (dict(seed="a"), "seed='a': a whole number"),
        (dict(packing_window=0), "packing_window=0: None, or a whole number"),
        (dict(packing_window=1 << 21), "packing_window=2097152: at most 1048576"),
        (dict(lanes=0), "lanes=0: a whole number, at least 1"),
        (dict(lanes=2.5), "lanes=2.5: a whole number"),
        (dict(lanes=1 << 40), "lanes=1099511627776: at most 65536"),
        (dict(cu_seqlens=True), "cu_seqlens=True with rows='padded'"),
        (dict(validation=["x"]), "validation=\\['x'\\]: a mapping"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], words: str, made: Any) -> None:
    with pytest.raises(ValueError, match=words):
        made(**options)


def test_a_mix_of_an_unknown_source_names_the_nearest(made: Any, urls: dict[str, str]) -> None:
    data = made(urls={"laion": urls["a"], "chat": urls["b"]}, stages=[{"name": "one", "mix": {"liaon": 1}}])
    with pytest.raises(ValueError, match="liaon.*laion"):
        data.setup()


def test_a_run_too_short_for_a_step_says_so(made: Any) -> None:
    with pytest.raises(ValueError, match="one optimizer step needs batch_size 300 x data-parallel size 1"):
        run(made(batch_size=300))


def test_no_run_is_longer_than_its_stages(made: Any) -> None:
    recorder = run(made(batch_size=8), max_epochs=3)
    assert len(joined([recorder])) == TOTAL
    assert torch.isfinite(recorder.weight)

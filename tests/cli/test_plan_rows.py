"""``megascale plan rows=FILE``: what it refuses before it works or writes, and what it says of columns, rows and sizes."""

import csv
import os
from pathlib import Path

import pytest

from lightning_megascale.cli import plan_rows
from tests.cli.test_plan import _argv, said  # noqa: F401  (_argv runs by itself: each test in a folder of its own)

MEASURED = "row_id,model,gpus,dp,memory_gb\na:1,Llama-3-8B,8,8,60\n"


def refused(capsys, words, *arguments):
    code, text = said(capsys, *arguments)
    assert code == 2 and words in text and "Traceback" not in text
    assert len(text.strip().splitlines()) == 1


@pytest.fixture
def no_prediction(monkeypatch):
    """Fails where a row is predicted."""
    monkeypatch.setattr(plan_rows, "predicted", lambda row: pytest.fail("predicted before the refusal"))


@pytest.mark.parametrize("out", ["runs.csv", "./runs.csv", "link.csv", "hard.csv", "folder/../runs.csv"])
def test_the_measurements_are_not_overwritten(capsys, no_prediction, out):
    Path("runs.csv").write_text(MEASURED)
    Path("link.csv").symlink_to("runs.csv")
    Path("hard.csv").hardlink_to("runs.csv")
    Path("folder").mkdir()
    refused(capsys, "which holds the measurements", "rows=runs.csv", f"out={out}")
    refused(capsys, "which holds the measurements", "rows=link.csv", f"out={out}")
    assert Path("runs.csv").read_text() == MEASURED


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("none/guess.csv", "there is no folder none"),
        ("folder", "is a folder"),
        ("", "out= is empty"),
        ("runs.csv/x.csv", "no folder runs.csv"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_any_work(capsys, no_prediction, out, words):
    Path("runs.csv").write_text(MEASURED)
    Path("folder").mkdir()
    Path("astray.csv").symlink_to("gone/guess.csv")
    before = sorted(os.listdir())
    refused(capsys, words, "rows=runs.csv", f"out={out}")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("there", [False, True])
def test_a_place_without_permission_is_found_before_any_work(capsys, no_prediction, monkeypatch, there):
    """Permission is taken away by hand: bits do not stop an administrator, who may be the one that runs this."""
    Path("runs.csv").write_text(MEASURED)
    if there:
        Path("guess.csv").write_text("kept")

    def denied(*arguments, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(plan_rows.tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(plan_rows.os, "open", denied)
    refused(capsys, "out=guess.csv: cannot be written: Permission denied", "rows=runs.csv", "out=guess.csv")
    assert not there or Path("guess.csv").read_text() == "kept"


def test_an_older_result_is_replaced_and_nothing_else_left(capsys):
    Path("runs.csv").write_text(MEASURED)
    Path("guess.csv").write_text("old")
    code, _ = said(capsys, "rows=runs.csv", "out=guess.csv")
    assert code == 0 and Path("guess.csv").read_text().startswith("row_id,predicted_seconds")
    assert sorted(os.listdir()) == ["guess.csv", "runs.csv"]


@pytest.mark.parametrize(
    ("rows", "words"), [("folder", "rows=folder: is a folder"), ("", "rows= is empty"), ("empty.csv", "no column row_id")]
)
def test_what_is_no_file_of_rows_is_said(capsys, rows, words):
    Path("folder").mkdir()
    Path("empty.csv").write_text("")
    refused(capsys, words, f"rows={rows}")


def test_a_column_that_may_be_misspelt_is_named_and_others_are_not(capsys):
    Path("runs.csv").write_text("row_id,model,hiden,Heads,cluster_name,mfu_pct,memory_gb\na:1,Llama-3-8B,4096,32,x,40,60\n")
    code, text = said(capsys, "rows=runs.csv")
    assert (
        code == 0 and "column hiden is not read; did you mean hidden?" in text and "column Heads is not read; did you mean heads?" in text
    )
    assert text.count("warning") == 2


def test_rows_that_are_not_predicted_are_named(capsys):
    lines = [f"a:{number},Nobody-9B,8" for number in range(7)] + ["b:1,Llama-3-8B,8", "b:2,Llama-3-8B,12"]
    Path("runs.csv").write_text("\n".join(["row_id,model,gpus", *lines]))
    code, text = said(capsys, "rows=runs.csv")
    assert code == 0 and "7 rows not predicted (a:0, a:1, a:2, a:3, a:4 and 2 more): model='Nobody-9B'" in text
    assert "1 row not predicted (b:2): " in text


def test_a_size_that_is_not_the_shapes_is_said(capsys):
    rest = ",".join(("gpu_type", "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "micro_batch", "global_batch", "recompute", "memory_gb"))
    lines = [f"a:{number},Llama-3-8B,{size},H100,8,1,1,1,1,8,1,8,full,60" for number, size in enumerate(("70", "8.0", "70", ""), 1)]
    Path("runs.csv").write_text("\n".join([f"row_id,model,params_b,{rest}", *lines]))
    code, text = said(capsys, "rows=runs.csv")
    assert code == 0 and "params_b=70 and the shape makes 8.03: the shape is taken (2 rows: a:1, a:3)" in text
    assert text.count("params_b") == 1


def test_a_file_without_measurements_shows_what_is_predicted(capsys):
    lines = [f"[a]:{number},Llama-3-8B,8,full" for number in range(22)] + ["b:1,Llama-3.1-405B,8,none"]
    Path("runs.csv").write_text("\n".join(["row_id,model,gpus,recompute", *reversed(lines)]))
    code, text = said(capsys, "rows=runs.csv", "out=guess.csv")
    assert code == 0 and "mean error" not in text and "and 3 more; out=FILE.csv writes all of them" in text
    with open("guess.csv") as file:
        written = {row["row_id"]: row for row in csv.DictReader(file)}
    shown = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words and words[0] in written}
    assert len(shown) == 20 and shown["b:1"][2] == "no" and shown["[a]:9"][2] == "yes"
    for row_id, (seconds, gigabytes, _) in shown.items():
        assert float(seconds) == pytest.approx(float(written[row_id]["predicted_seconds"]), rel=1e-3)
        assert float(gigabytes) == pytest.approx(float(written[row_id]["predicted_memory_gb"]) * 2**30 / 1e9, abs=0.06)


def test_a_file_with_measurements_shows_errors_only(capsys):
    Path("runs.csv").write_text(MEASURED)
    code, text = said(capsys, "rows=runs.csv")
    assert code == 0 and "mean error" in text and "predicted seconds" not in text

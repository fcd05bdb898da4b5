"""``megascale verify``: arguments, the table, the exit code, and mistakes as one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_megascale.cli import verify as cli
from lightning_megascale.cli.errors import UserError
from lightning_megascale.cli.verify import exit_code, main, parse, table, without_machinery
from lightning_megascale.verification import Report
from tests.cli.run_megascale import megascale

MODEL = '''"""A user's file."""
from tests.verification.models import *
LAYOUT_AS_DICT = {"blocks": "h.*", "first": ["wte"], "last": ["ln_f", "out"]}
def many(size): ...
NUMBER = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's file in it; names of modules are free again afterwards."""
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import os\n\nimport no_such_package\n")
    (tmp_path / "wrong.py").write_text("x = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_model", "broken", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_equal_is_0_and_a_table_that_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["target=my_model:build", "layout=my_model:LAYOUT_AS_DICT", "axes=[fsdp2, pp2:gpipe]", "steps=2", "plan.label_alignment=shift"]
    )
    out = capsys.readouterr().out
    assert code == 0, out
    lines = out.splitlines()
    assert lines[0].startswith("Words, ") and lines[0].endswith(" parameters, 2 steps of 4 rows in float64, against one device")
    lines[1], lines[2] = sorted(lines[1:3], reverse=True)
    assert lines[1] == "note: what the model computes in float32 whatever it is given is computed in float64 on both sides"
    assert lines[2] == "note: the first 2 of 3 batches are used; steps=3 uses all"
    del lines[1:3]
    assert lines[1].split() == ["axes", "loss", "gradient", "worst", "in", "norm", "parameters", "verdict"]
    assert [line.split()[0] for line in lines[2:4]] == ["fsdp2", "pp2:gpipe"] and all(line.split()[-1] == "equal" for line in lines[2:4])
    assert lines[-1] == "all 2 combinations give the numbers of one device (tolerance 1e-10)"
    assert max(map(len, lines)) <= 100


def test_a_difference_is_1_and_names_the_module(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target=my_model:build_centered", "axes=fsdp2"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out and "0 of 1 combinations give the numbers of one device" in out
    assert "fsdp2 differs, first in model.h.1.between: its output in the first forward is off by" in out
    assert "\n  usually: it works on several rows together" in out


def test_a_refusal_is_2_and_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["target=my_model:build", "axes=pp2,cp2"]) == 2
    out = capsys.readouterr().out
    assert "pp2 is refused: Words cannot be parallelized as asked:" in out and "blocks='h.*'" in out
    assert "cp2 is refused: this parallel plan cannot run:" in out and "other arguments of the strategy are plan.KEY=VALUE" in out


def test_an_error_on_a_rank_is_1_with_the_users_own_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fails.py").write_text(
        "from tests.verification.models import *\n\n\nclass Mine(Words):\n    def training_step(self, batch, i):\n"
        "        assert not dist.is_initialized(), 'ranks!'\n        return super().training_step(batch, i)\n\n\n"
        "def build():\n    return Mine(), batches()\n"
    )
    assert main(["target=fails:build", "axes=fsdp2"]) == 1
    out = capsys.readouterr().out
    assert "fsdp2 failed: rank" in out and "fails.py" in out and "AssertionError: ranks!" in out
    assert "lightning/pytorch" not in out and "lightning_megascale/" not in out
    sys.modules.pop("fails")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tp2"], "arguments are key=value; 'tp2' has no '='"),
        (["axes=tp2"], "verify needs target=my_model:build"),
        (["target=my_model:build"], "verify needs axes=[tp2,fsdp2xtp2,pp2]"),
        (["target=my_model:build", "axis=tp2"], "verify has no key 'axis'; did you mean 'axes'?"),
        (["target=my_model:build", "axes=tp2", "plan.compil=true"], "did you mean 'plan.compile'?"),
        (["target=my_model:build", "axes=tp2", "sequence_parallel=true"], "did you mean 'plan.sequence_parallel'?"),
        (["target=my_model:build", "axes=tp2", "axes=pp2"], "axes is given twice"),
        (["target=my_model:build", "axes=tp2", "dtype=bfloat16"], "dtype=bfloat16: must be float64 or float32"),
        (["target=my_model:build", "axes=tp2", "steps=few"], "steps=few: must be a whole number"),
        (["target=my_model:build", "axes=tp2", "tolerance=small"], "tolerance=small: must be a number"),
        (["target=my_model:build", "axes=tp2", "layout={a"], "layout={a: cannot be read"),
        (
            ["target=my_model:build", "axes=tp2", "layout=my_model:LAYOT"],
            "layout=my_model:LAYOT: my_model has no 'LAYOT'; did you mean 'LAYOUT'?",
        ),
        (["target=my_model:build", "axes=tp2", "layout={blocs: h.*}"], "layout has no role 'blocs'; did you mean 'blocks'?"),
        (["target=my_model:build", "axes=tp2", "plan.tensor_parallel_size=4"], "sizes come from axes"),
        (["target=my_model:build", "axes=[tpp2]"], "axes='tpp2' is no axis; did you mean 'tp2'?"),
        (["target=my_model", "axes=tp2"], "target=my_model: must be MODULE:NAME, such as my_model:build"),
        (["target=my_model.build", "axes=tp2"], "did you mean my_model:build?"),
        (["target=my_model.py:build", "axes=tp2"], "name the module, not the file: my_model:build"),
        (["target=my_modle:build", "axes=tp2"], "there is no module 'my_modle' in"),
        (["target=my_model:biuld", "axes=tp2"], "my_model has no 'biuld'; did you mean 'build'?"),
        (["target=broken:build", "axes=tp2"], "broken cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        (["target=wrong:build", "axes=tp2"], "wrong cannot be imported: ZeroDivisionError: division by zero (wrong.py, line 1)"),
        (["target=my_model:NUMBER", "axes=tp2"], "target=my_model:NUMBER: is a int and cannot be called"),
        (["target=my_model:many", "axes=tp2"], "build() failed: TypeError: many() missing 1 required positional argument: 'size'"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err + captured.out and captured.out == ""
    assert captured.err.startswith("megascale: ")


def test_values_are_read() -> None:
    given = parse(
        [
            "target=a:b",
            "axes=[tp2, pp2]",
            "tolerance=1e-8",
            "timeout=20",
            "microbatch_size=null",
            "plan.pipeline_schedule=1F1B",
            "plan.compile=false",
            "plan.pipeline_split=[h.1, last]",
            "layout={blocks: 'h.*', norms: [a, b]}",
        ]
    )
    assert given == {
        "target": "a:b",
        "axes": ["tp2", "pp2"],
        "tolerance": 1e-8,
        "timeout": 20.0,
        "microbatch_size": None,
        "pipeline_schedule": "1F1B",
        "compile": False,
        "pipeline_split": ["h.1", "last"],
        "layout": {"blocks": "h.*", "norms": ["a", "b"]},
    }


def test_exit_codes() -> None:
    equal, refused = Report("tp2", True), Report("tp2", False, refused="no")
    different, failed = Report("tp2", False), Report("tp2", False, error="Traceback")
    assert exit_code([equal]) == 0
    assert exit_code([equal, refused]) == 2
    assert exit_code([refused, different]) == exit_code([failed]) == 1


def test_names_that_do_not_fit_lose_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    name = "model.model.language_model.layers.12.self_attn.q_proj.weight"
    report = Report("pp2xfsdp2xtp2:interleaved1f1b", False, None, None, 1e-3, (1.5e-3, name), 0.0, (2e-3, name), "x", "y", 12.34)
    Console(width=100).print(table([report, Report("tp2", False, refused="no")], 100))
    header, row, refused = capsys.readouterr().out.splitlines()
    assert len(row) <= 100 and "…" in row and "q_proj.weight" in row
    assert row.split()[-3:] == ["0", "2.0e-03", "DIFFERENT"]
    assert refused.split() == ["tp2", "refused"]


def test_tracebacks_keep_the_users_frames_and_the_last() -> None:
    text = "\n".join(
        [
            "rank 1:",
            "Traceback (most recent call last):",
            '  File "/x/site-packages/torch/a.py", line 1, in a',
            "    a()",
            "    ^^^",
            '  File "/home/me/model.py", line 2, in b',
            "    b()",
            '  File "/x/site-packages/torch/c.py", line 3, in c',
            "    c()",
            "ValueError: d",
        ]
    )
    shown = without_machinery(text).splitlines()
    assert shown == [*text.splitlines()[:2], *text.splitlines()[5:]]
    assert without_machinery("ranks [1] did not finish in 4 s") == "ranks [1] did not finish in 4 s"


def test_the_verb_is_listed_and_explains_itself(tmp_path: Path) -> None:
    listed, explained = megascale(cwd=tmp_path), megascale("verify", "--help", cwd=tmp_path)
    assert "verify " in listed.stdout
    assert explained.returncode == 0 and "axes=[tp2,fsdp2xtp2,pp2]" in explained.stdout and "Exit code: 0 all equal" in explained.stdout
    wrong = megascale("verify", "target=no_such:build", "axes=tp2", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("megascale: target=no_such:build: there is no module 'no_such'")


def test_every_key_is_explained() -> None:
    assert all(f"\n  {key}=" in cli.USAGE for key in cli._KEYS)
    with pytest.raises(UserError):
        parse([])

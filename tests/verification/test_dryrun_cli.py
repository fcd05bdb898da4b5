"""``megascale dryrun``: what it prints, what it refuses, and the 175B model on 1,024 ranks."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from lightning_megascale.cli import dryrun
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.verification.dryrun import compare
from tests.cli.run_megascale import megascale

SMALL = ["model=tiny", "batch.sequence_length=32", "batch.global_size=8", "batch.micro_size=1", "launch.ranks=4"]


def test_a_table_of_stages(capsys):
    assert dryrun.main([*SMALL, "plan=pp2", "model.vocab_size=32768", "--schedule"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 ranks, dp_shard 2, pp 2, 1F1B\n8 rows of 32 tokens, 4 microbatches of 1, 32-true\n")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.splitlines()}
    assert rows["a rank of stage"] == ["0", "1"]
    assert [float(cell) for cell in rows["parameters, GB"]] == pytest.approx([0.004, 0.004], abs=6e-4)
    assert rows["microbatches in flight"] == ["2", "1"]
    sent = re.search(r"dp_shard +all_gather +float32 +(\S+) +(\S+)", out)
    assert sent and [float(cell) for cell in sent.groups()] == pytest.approx([0.009, 0.008], abs=6e-4)
    assert "stage 0, 4 microbatches: F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3" in out
    assert "the planner agrees: at most 0.00% off" in out


def test_the_planner_must_agree(capsys, monkeypatch):
    monkeypatch.setattr(compare, "planned", lambda *args, **kwargs: {"FLOP per step": 1.0})
    assert dryrun.main([*SMALL]) == 1
    assert re.search(
        r"disagree by more than 5%.*\n  stage 0: FLOP per step is \S+ in the dry run and 1 in the planner", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=tiny"], "nothing says of how many: add launch.ranks=N or cluster=NAME"),
        (["model=tiny", "launch.ranks=none"], "launch.ranks=none: must be auto or a whole number of at least 1"),
        (["recipe=dense_17b"], "there is no recipe 'dense_17b'; did you mean 'dense_175b'?"),
        (["recipe=dense_175b", "launch.ranks=512"], "this parallel plan cannot run on 512 ranks"),
        (["model=tiny", "--ful"], "dryrun has no flag --ful: its flags are --full, --schedule and --config-dir FOLDER"),
        (["model=tiny", "--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder"),
        ([*SMALL, "optim=none"], "optim=none: a dry run counts the bytes of an optimizer"),
        ([*SMALL, "trainer.precision=16-mixed"], "trainer.precision=16-mixed: must be one of 32-true, bf16-true, bf16-mixed, 64-true"),
        ([*SMALL, "batch.sequence_length=9999"], "batch.sequence_length=9999 is more than model.max_position_embeddings=256"),
        ([*SMALL, "plan.compile=true"], "plan.compile: a compiler decides what is kept and fused"),
        ([*SMALL, "plan.tensor_parallel_size=2", "model.num_heads=3", "model.head_dim=16"], "3 heads"),
        ([*SMALL, "model={_target_: torch.nn.Linear}"], "model"),
    ],
)
def test_mistakes_are_one_message(arguments, message, capsys):
    assert dryrun.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("megascale: ") and "Traceback" not in captured.err


def test_training_it_on_a_laptop_says_how_many_ranks_it_needs(tmp_path):
    done = megascale("train", "recipe=dense_175b", "launch.ranks=2", cwd=tmp_path)
    assert done.returncode == 2 and "this parallel plan cannot run on 2 ranks" in done.stderr and "multiple of 64 ranks" in done.stderr


def test_help(capsys):
    assert dryrun.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("megascale dryrun [recipe=NAME]")


SCRIPT = """
import json, resource, sys
from lightning_megascale.cli import dryrun
from lightning_megascale.verification.dryrun import compare
from lightning_megascale.verification.dryrun.run import dry_run
if __name__ == "__main__":
    run = dry_run(dryrun.subject_of(dryrun.parse(["recipe=dense_175b"])))
    compare.check(run.differences)
    unit = 1 if sys.platform == "darwin" else 1024
    used = [resource.getrusage(who).ru_maxrss * unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peaks = [entry.planned / entry.traced for entry in run.differences if entry.name == compare.PEAK_BYTES]
    alike = [trace.alike for trace in run.stages]
    print(json.dumps({"world": run.world_size, "alike": alike, "parameters": run.parameters, "used": used, "peaks": peaks}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_175b_on_1024_ranks(tmp_path):
    """All stages, in a process of their own; they hold the whole model, agree with the planner, and no process needs 2 GB."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["world"] == 1024 and found["alike"] == [[0], [1, 2, 3, 4, 5, 6], [7]]
    config = dataclasses.asdict(PRESETS["dense_175b"])
    assert found["parameters"] == from_decoder_config(config).parameters == 174_615_846_912
    assert max(found["used"]) < 2e9 and found["peaks"] == pytest.approx([1, 1, 1], abs=0.02)


def test_experts_in_float32_are_refused_before_anything_is_traced(capsys):
    assert dryrun.main(["model=tiny_moe", "launch.ranks=2", "trainer.precision=32-true"]) == 2
    assert "experts are traced as grouped products, which are of bfloat16" in capsys.readouterr().err


def test_tied_weights_of_two_stages_on_one_rank_are_two_copies(capsys):
    v = ("plan=pp2", "launch.ranks=2", "plan.pipeline_schedule=ZBVZeroBubble", "plan.pipeline_stages_per_rank=2")
    assert dryrun.main(["recipe=quickstart", *v]) == 0
    assert "the planner agrees" in capsys.readouterr().out

"""``megascale train``: resume rules, and real runs on two ranks (finished, interrupted, refused, failing, in a sweep, in torchrun)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_megascale.cli import resume
from lightning_megascale.cli.errors import UserError
from tests.cli.run_megascale import TINY, environment, megascale


def options(folder, **changes):
    values = {
        "run": {"dir": str(folder)},
        "resume": "auto",
        "seed": 0,
        "batch": {"global_size": 16, "micro_size": 8, "sequence_length": 32},
        "plan": {"tensor_parallel_size": 1},
        "model": {"hidden_size": 64},
        "optim": {"lr": 0.1, "betas": [0.9, 0.95]},
        "data": {"cache_dir": None, "vocab_size": 512},
        "trainer": {"max_steps": 4},
        "callbacks": {"a": 1},
    }
    for key, value in changes.items():
        parts = key.split("__")
        inner = values
        for part in parts[:-1]:
            inner = inner[part]
        inner[parts[-1]] = value
    return values


@pytest.fixture
def begun(tmp_path):
    """A run folder with two checkpoints; the one of the earlier step was touched last and has the higher name."""
    resume.write_config(options(tmp_path))
    for step in (10, 9):
        whole(tmp_path / "checkpoints" / f"step-{step}.ckpt", step)
    (tmp_path / "checkpoints" / "last.ckpt").symlink_to("step-9.ckpt")
    return tmp_path


def whole(folder, step, time="2026-01-01T00:00:00+0000"):
    """What is looked at of a complete checkpoint."""
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    (folder / "megascale.json").write_text(json.dumps({"step": step, "time": time, "files": {}}))


def test_an_empty_folder_starts(tmp_path):
    assert resume.decide(options(tmp_path)) == resume.Start(None, None)
    resume.write_config(options(tmp_path))  # a start that never reached a checkpoint binds nobody
    assert resume.decide(options(tmp_path, optim__lr=0.2)) == resume.Start(None, None)


def test_an_interrupted_run_goes_on_from_the_newest_checkpoint(begun):
    assert resume.decide(options(begun)) == resume.Start(f"{begun}/checkpoints/step-10.ckpt", None)


def test_a_finished_run_is_finished_until_it_is_made_longer(begun):
    resume.write_finished(options(begun), {"step": 4})
    assert resume.decide(options(begun, callbacks__a=2)).finished["step"] == 4
    assert resume.decide(options(begun, trainer__max_steps=8)) == resume.Start(f"{begun}/checkpoints/step-10.ckpt", None)
    resume.write_config(options(begun, trainer__max_steps=8))
    assert resume.decide(options(begun)).finished is None


@pytest.mark.parametrize(
    ("key", "value", "row"),
    [
        ("optim__lr", 0.2, "optim.lr: 0.1 there, 0.2 now"),
        ("optim__betas", [0.9, 0.99], "optim.betas: [0.9, 0.95] there, [0.9, 0.99] now"),
        ("model__hidden_size", 128, "model.hidden_size: 64 there, 128 now"),
        ("model__bias", True, "model.bias: absent there, True now"),
        ("data__vocab_size", 1024, "data.vocab_size: 512 there, 1024 now"),
        ("seed", 1, "seed: 0 there, 1 now"),
        ("batch__global_size", 32, "batch.global_size: 16 there, 32 now"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(begun, key, value, row):
    with pytest.raises(UserError) as error:
        resume.decide(options(begun, **{key: value}))
    assert row in str(error.value)
    assert "run.name=NEW" in str(error.value) and "resume=never" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("batch__micro_size", 4), ("plan__tensor_parallel_size", 2), ("data__cache_dir", "/x"), ("callbacks__a", 2)]
)
def test_what_a_resume_may_change(begun, key, value):
    assert resume.decide(options(begun, **{key: value})).checkpoint.endswith("step-10.ckpt")


def test_a_changed_batch_can_be_meant(begun):
    changed = options(begun, batch__global_size=32, plan__allow_batch_change=True)
    assert resume.decide(changed).checkpoint.endswith("step-10.ckpt")


def test_resume_by_path(begun):
    path = f"{begun}/checkpoints/step-9.ckpt"
    assert resume.decide(options(begun, resume=path, optim__lr=0.5)) == resume.Start(path, None)
    with pytest.raises(UserError, match=r"no such checkpoint; did you mean '.*step-9.ckpt'"):
        resume.decide(options(begun, resume=f"{begun}/checkpoints/step-99.ckpt"))


def test_only_complete_checkpoints_of_ours_are_resumed_from(begun):
    """The step decides, then the time that was written into it; exports and torn folders do not count."""
    checkpoints = begun / "checkpoints"
    (checkpoints / "last-export.ckpt").write_bytes(b"PK\x03\x04")
    for number, lacking in enumerate((".metadata", "megascale.json")):
        whole(checkpoints / f"step-{20 + number}.ckpt", 20 + number)
        (checkpoints / f"step-{20 + number}.ckpt" / lacking).unlink()
    whole(checkpoints / "step-22.ckpt", 22)
    (checkpoints / "step-22.ckpt" / "megascale.json").write_text("{")
    assert resume.last_checkpoint(begun).endswith("step-10.ckpt")
    whole(checkpoints / "again.ckpt", 10, "2026-01-01T00:00:01+0000")
    assert resume.last_checkpoint(begun).endswith("again.ckpt")


def test_starting_over_moves_nothing_of_the_users(begun):
    (begun / ".git").mkdir()
    (begun / "thesis.tex").touch()
    assert resume.move_earlier(str(begun)) == begun / "earlier" / "1"
    assert sorted(path.name for path in (begun / "earlier" / "1").iterdir()) == ["checkpoints", "config.json"]
    assert sorted(path.name for path in begun.iterdir()) == [".git", "earlier", "thesis.tex"]
    (begun / "checkpoints").mkdir()  # without our config.json: somebody else's
    assert resume.move_earlier(str(begun)) is None and (begun / "checkpoints").is_dir()


@pytest.mark.parametrize("content", ["", "{}", '{"run": {', "[1]"])
@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_config_that_is_not_ours_is_named_and_left_alone(begun, content, mode):
    (begun / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json is not the config of a run.*run\.name=NEW"):
        resume.decide(options(begun, resume=mode))
    assert (begun / "config.json").read_text() == content


@pytest.mark.parametrize("content", ["", "{}", '{"fingerprint": "', "[1]"])
def test_a_damaged_finished_marker_means_not_finished(begun, content):
    (begun / "finished.json").write_text(content)
    assert resume.decide(options(begun)) == resume.Start(f"{begun}/checkpoints/step-10.ckpt", None)
    assert resume.read_finished(str(begun)) is None


def test_a_run_folder_has_one_run_at_a_time(tmp_path, monkeypatch):
    import fcntl

    with resume.claim(str(tmp_path / "run")):
        with pytest.raises(UserError, match=r"run is in use: .*run\.name=NEW"), resume.claim(str(tmp_path / "run")):
            pass
        with resume.claim(str(tmp_path / "other")):
            pass
    with resume.claim(str(tmp_path / "run")):  # free again
        pass

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with resume.claim(str(tmp_path / "run")):
        pass


@pytest.mark.parametrize("run", [{"name": "", "dir": "runs/"}, {"name": " ", "dir": "x"}, {"name": "x", "dir": ""}])
def test_a_run_without_a_name_is_refused(run):
    with pytest.raises(UserError, match="must not be empty"):
        resume.check_name(run)


def test_two_starts_and_an_empty_name_end_with_2(tmp_path):
    with resume.claim(str(tmp_path / "runs" / "quickstart")):
        done = megascale("train", *TINY, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("megascale: runs/quickstart is in use"), done.stderr
    done = megascale("train", *TINY, "run.name=", "resume=never", cwd=tmp_path)
    assert done.returncode == 2 and "run.name='': must not be empty" in done.stderr, done.stderr


def test_never_keeps_the_earlier_runs(begun):
    assert resume.decide(options(begun, resume="never", optim__lr=0.5)) == resume.Start(None, None)
    (begun / "logs").mkdir()
    assert resume.move_earlier(str(begun)) == begun / "earlier" / "1"
    assert sorted(path.name for path in begun.iterdir()) == ["earlier", "logs"]
    assert resume.last_checkpoint(begun / "earlier" / "1").endswith("step-10.ckpt")
    assert resume.move_earlier(str(begun)) is None
    resume.write_config(options(begun))
    assert resume.move_earlier(str(begun)) == begun / "earlier" / "2"


def losses(run: Path) -> dict[int, float]:
    """Step -> training loss over all starts of a run; the later start wins."""
    found = {}
    for file in sorted(run.glob("metrics/version_*/metrics.csv"), key=lambda file: int(file.parent.name.rpartition("_")[2])):
        names, *rows = [line.split(",") for line in file.read_text().splitlines()]
        for row in rows:
            values = dict(zip(names, row))
            if values.get("train/loss"):
                found[int(values["step"])] = float(values["train/loss"])
    return found


def test_train_then_finished_then_refused_then_never(tmp_path):
    done = megascale("train", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "quickstart"
    for line in (
        "model  decoder 172k parameters, 2 layers x 64",
        "ranks  2 x CPU, plan dp_shard 2",
        "batch  16 = micro 8 x accumulation 1 x dp 2, 32 tokens each",
        "run    runs/quickstart",
        "the model writes:",
        "what to try next:",
        "checkpoint  runs/quickstart/checkpoints/step-4.ckpt",
        "loss curve  runs/quickstart/loss.png",
    ):
        assert line in done.stdout, done.stdout
    assert re.search(r"step 4/4  loss \d\.\d+  val \d\.\d+", done.stdout)
    assert done.stderr == ""  # no tips, no warnings that nobody can act on
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "finished.json").read_text())["step"] == 4
    first = losses(run)
    assert list(first) == [0, 1, 2, 3]

    again = megascale("train", *TINY, cwd=tmp_path)
    assert again.returncode == 0 and "runs/quickstart is finished: 4 steps, val loss " in again.stdout, again.stderr
    assert losses(run) == first

    other = megascale("train", *TINY, "optim.lr=0.5", cwd=tmp_path)
    assert other.returncode == 2 and "optim.lr: 0.002 there, 0.5 now" in other.stderr

    anew = megascale("train", *TINY, "optim.lr=0.5", "resume=never", cwd=tmp_path)
    assert anew.returncode == 0 and "the earlier run is kept in runs/quickstart/earlier/1" in anew.stdout, anew.stderr
    assert losses(run / "earlier" / "1") == first != losses(run)


FAIL = """
import os, signal, time
from lightning.pytorch.callbacks import Callback

class Fail(Callback):
    def __init__(self, rank, step, attempts=1, how="raise"):
        self.rank, self.step, self.attempts, self.how = rank, step, attempts, how
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step != self.step or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) >= self.attempts:
            return
        if self.how == "signal parent" and trainer.global_rank == 0:
            os.kill(int(os.environ["MEGASCALE_PARENT"]), signal.SIGINT)
            time.sleep(1)
        if self.how == "raise" and trainer.global_rank == self.rank:
            raise RuntimeError(f"boom on rank {self.rank}")
"""


def failing(tmp_path, **arguments):
    """Overrides that add a callback from the current folder's own module."""
    (tmp_path / "own_module.py").write_text(FAIL)
    return ["+callbacks.fail._target_=own_module.Fail", *(f"+callbacks.fail.{name}={value}" for name, value in arguments.items())]


@pytest.mark.slow
def test_a_failing_rank_is_named_and_the_run_goes_on_later(tmp_path):
    saving = "callbacks.checkpoint.every_n_train_steps=2"
    done = megascale("train", *TINY, saving, *failing(tmp_path, rank=1, step=3), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: boom on rank 1") == 1 and done.stderr.count("Traceback") == 1
    assert "rank 1 failed first" in done.stderr
    again = megascale("train", *TINY, saving, cwd=tmp_path)
    assert again.returncode == 0 and "resumes from runs/quickstart/checkpoints/step-2.ckpt" in again.stdout, again.stderr
    whole = megascale("train", *TINY, "run.name=whole", cwd=tmp_path)
    assert whole.returncode == 0
    expected = losses(tmp_path / "runs" / "whole")
    assert losses(tmp_path / "runs" / "quickstart") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_interrupted_run_writes_a_checkpoint_and_goes_on(tmp_path):
    """Ctrl-C reaches the parent; the ranks stop after the same step, which the next start follows."""
    stopping = failing(tmp_path, rank=0, step=2, how="'signal parent'")
    done = megascale("train", *TINY, *stopping, cwd=tmp_path)
    assert done.returncode == 130, done.stdout + done.stderr
    said = re.search(r"stopped by SIGINT after step (\d)", done.stdout)
    assert said and (tmp_path / f"runs/quickstart/checkpoints/step-{said[1]}.ckpt").exists()
    assert not (tmp_path / "runs/quickstart/finished.json").exists()
    again = megascale("train", *TINY, cwd=tmp_path)
    assert again.returncode == 0 and f"resumes from runs/quickstart/checkpoints/step-{said[1]}.ckpt" in again.stdout, again.stderr
    assert list(losses(tmp_path / "runs" / "quickstart")) == [0, 1, 2, 3]


@pytest.mark.slow
def test_restarts_go_on_from_the_last_checkpoint(tmp_path):
    arguments = ["callbacks.checkpoint.every_n_train_steps=2", "launch.max_restarts=1"]
    done = megascale("train", *TINY, *arguments, *failing(tmp_path, rank=1, step=3), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumes from runs/quickstart/checkpoints/step-2.ckpt") == 1
    assert list(losses(tmp_path / "runs" / "quickstart")) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_users_error_on_the_ranks_is_one_message(tmp_path):
    arguments = ["trainer.max_steps=-1", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "launch.ranks=2", "model=tiny"]
    done = megascale("train", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["megascale: total_steps=2: must exceed warmup_steps=20; train longer or warm up for less"],
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = megascale("train", *arguments, cwd=tmp_path, command=torchrun)
    assert done.stderr.count("total_steps=2: must exceed warmup_steps=20") == 1, done.stderr


@pytest.mark.slow
def test_inside_torchrun_nothing_is_started(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = megascale("train", *TINY, cwd=tmp_path, command=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks  2 x CPU") == 1 and "step 4/4" in done.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart"]
    again = megascale("train", *TINY, cwd=tmp_path, command=torchrun)
    assert again.returncode == 0 and again.stdout.count("is finished") == 1, again.stdout


@pytest.mark.slow
def test_inside_a_slurm_step_nothing_is_started(tmp_path):
    """srun's variables on two processes."""
    variables = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2"}
    variables |= {"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "x", "SLURM_NODELIST": "localhost", "MASTER_PORT": "29631"}
    variables |= {"MASTER_ADDR": "localhost"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_megascale.cli", "train", *TINY],
            cwd=tmp_path,
            env=environment(**variables, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "ranks  2 x CPU" in outputs[0][0] and outputs[1][0] == ""


@pytest.mark.slow
def test_a_sweep_trains_one_run_after_the_other(tmp_path):
    done = megascale("train", *TINY, "--multirun", "optim.lr=1e-3,1e-2", "~callbacks.sample", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = [folder for folder in (tmp_path / "runs" / "quickstart").iterdir() if folder.is_dir()]
    assert sorted(re.search(r"optim\.lr=([\d.]+)", folder.name)[1] for folder in folders) == ["0.001", "0.01"]
    assert all((folder / "finished.json").exists() for folder in folders)
    rows = done.stdout[done.stdout.index("val loss   run") :].splitlines()[1:]
    values = [float(row.split()[0]) for row in rows]
    assert len(rows) == 2 and values == sorted(values)


@pytest.mark.slow
def test_own_model_and_own_lightning_module(tmp_path):
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "import lightning.pytorch as pl\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, vocabulary, width=16):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(vocabulary, width)\n"
        "        self.head = torch.nn.Linear(width, vocabulary)\n"
        "    def forward(self, input_ids):\n"
        "        return self.head(self.embed(input_ids))\n"
        "class Lit(pl.LightningModule):\n"
        "    def __init__(self, vocabulary):\n"
        "        super().__init__()\n"
        "        self.model = Net(vocabulary)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        x = batch['input_ids']\n"
        "        loss = torch.nn.functional.cross_entropy(self.model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())\n"
        "        self.log('train/loss', loss, prog_bar=True)\n"
        "        return loss\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
    )
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "model" / "net.yaml").write_text("_target_: own_model.Net\nvocabulary: ${data.vocab_size}\nwidth: 8\n")
    (own / "model" / "lit.yaml").write_text("_target_: own_model.Lit\nvocabulary: ${data.vocab_size}\n")
    arguments = [*TINY[1:], "--config-dir", "own", "data.vocab_size=512", "~callbacks.sample"]
    done = megascale("train", *arguments, "model=net", "run.name=net", cwd=tmp_path)
    assert done.returncode == 0 and "model  own_model.Net" in done.stdout, done.stderr
    refused = megascale("train", *arguments, "model=lit", "run.name=lit", cwd=tmp_path)
    assert refused.returncode == 2 and "brings its own optimizers: say optim=none" in refused.stderr
    arguments.remove("optim.schedule.warmup_steps=2")
    done = megascale("train", *arguments, "model=lit", "optim=none", "run.name=lit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_to_try_next_works(tmp_path):
    """The commands that the quickstart ends with, made short."""
    import yaml

    from lightning_megascale.cli import config

    assert megascale("train", *TINY, cwd=tmp_path).returncode == 0
    short = [argument for argument in TINY if not argument.startswith("launch")]
    for command in yaml.safe_load((config.RECIPES / "quickstart.yaml").read_text())["run"]["next"]:
        program, verb, *rest = command.replace("${run.dir}", "runs/quickstart").split()
        assert program == "megascale"
        if verb == "train":
            rest += [*short, *([] if any(part.startswith("launch.ranks") for part in rest) else ["launch.ranks=2"])]
        done = megascale(verb, *rest, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_ctrl_c_on_a_terminal(tmp_path):
    """Under a pseudo-terminal: the live line is drawn, ^C ends everything with 130, and nothing is left running."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(
            sys.executable, [sys.executable, "-m", "lightning_megascale.cli", "train", *TINY, "trainer.max_steps=2000"], environment()
        )
    seen = b""
    end = time.monotonic() + 200
    while not re.search(rb"step [1-9]\d*/2000", seen) and time.monotonic() < end:
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 65536):
            seen += data
    except OSError:
        pass
    _, status = os.waitpid(pid, 0)
    text = seen.decode(errors="replace")
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT, text[-2000:]
    assert "Traceback" not in text and re.search(r"stopped by SIGINT after step \d+", text), text[-2000:]

    def left() -> list[str]:
        states = subprocess.run(["ps", "-o", "stat=", "-s", str(pid)], capture_output=True, text=True, check=False).stdout.split()
        return [state for state in states if not state.startswith("Z")]

    end = time.monotonic() + 30  # a helper process of the ranks may see the end a moment later
    while left() and time.monotonic() < end:
        time.sleep(0.2)
    assert left() == []


@pytest.mark.slow
def test_ranks_end_with_a_command_that_is_killed(tmp_path):
    """``kill -9`` of the command leaves nothing behind, and the ranks still write a checkpoint."""
    command = [sys.executable, "-m", "lightning_megascale.cli", "train", *TINY, "trainer.max_steps=5000"]
    train = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )

    def left():
        states = subprocess.run(["ps", "-o", "stat=", "-s", str(train.pid)], capture_output=True, text=True, check=False).stdout.split()
        return [state for state in states if not state.startswith("Z")]

    def wait_for(what, seconds):
        end = time.monotonic() + seconds
        while not what() and time.monotonic() < end:
            time.sleep(0.2)
        return what()

    try:
        assert wait_for(lambda: list(tmp_path.glob("runs/quickstart/metrics/version_*/metrics.csv")), 200)
        train.kill()
        train.wait()
        assert wait_for(lambda: not left(), 60), left()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(train.pid, signal.SIGKILL)
    assert resume.last_checkpoint(tmp_path / "runs" / "quickstart") is not None


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path):
    command = [sys.executable, "-m", "lightning_megascale.cli", "train", *TINY, "trainer.max_steps=400"]
    train = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert train.stdout.readline().startswith("model  decoder")
    train.stdout.close()
    said = train.stderr.read()
    assert train.wait(timeout=200) in (0, 128 + signal.SIGPIPE), said
    assert said == ""

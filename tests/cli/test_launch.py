"""The launcher: who is a rank already, which rank failed first, exit codes, restarts that find their peers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from lightning_megascale.cli import launch
from tests.cli.run_megascale import environment


@pytest.mark.parametrize(
    ("variables", "inside", "rank", "world", "local"),
    [
        ({}, False, 0, 1, 1),
        ({"RANK": "3"}, False, 0, 1, 1),  # a stray variable makes no rank
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, True, 3, 8, 4),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, False, 0, 2, 1),  # the batch script
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, True, 5, 8, 4),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3"}, True, 5, 7, 4),
        ({"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}, False, 0, 1, 1),  # an interactive shell
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True, 1, 2, 2),
    ],
)
def test_who_is_a_rank_already(monkeypatch, variables, inside, rank, world, local):
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "SLURM", "OMPI")) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.inside_launcher(), launch.rank(), launch.world_size(), launch.local_world_size()) == (inside, rank, world, local)


def failed(folder, rank, text, nanoseconds):
    file = folder / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": text}}}))
    os.utime(file, ns=(nanoseconds, nanoseconds))


def told(folder, seen=0, code=1):
    failure = SimpleNamespace(exitcode=code)
    return launch.describe_failure(SimpleNamespace(get_first_failure=lambda: (seen, failure), failures={seen: failure}), folder)


def test_a_lost_peer_explains_nothing(tmp_path):
    failed(tmp_path, 0, "RuntimeError: Connection closed by peer", 1)
    failed(tmp_path, 1, "ZeroDivisionError: the cause", 2)
    failed(tmp_path, 2, "ValueError: later", 3)
    message, code = told(tmp_path)
    assert code == 1
    assert message.startswith("ZeroDivisionError: the cause") and "later" not in message
    assert "rank 1 failed first; ranks [2, 0] fell with it" in message or "rank 1 failed first; ranks [0, 2] fell with it" in message


def test_only_lost_peers_mean_a_killed_rank(tmp_path):
    failed(tmp_path, 0, "RuntimeError: Connection reset by peer", 1)
    message, code = told(tmp_path, seen=1, code=-9)
    assert code == 1 and "rank 1 ended with exit code -9: a rank was killed from outside (out of memory?)" in message


def test_the_killed_rank_is_the_one_that_left_no_report(tmp_path):
    """torch names the rank whose exit it saw first, here the one that lost its peer."""
    failed(tmp_path, 0, "RuntimeError: Connection closed by peer", 1)
    (tmp_path / "1").mkdir()
    message, code = told(tmp_path, seen=0, code=1)
    assert code == 1 and message.startswith("megascale: rank 1 ended without a word and the others lost it: a rank was killed from outside")


def test_a_closed_pipe_is_seen(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert not launch.stdout_has_no_reader()
        os.close(reading)
        assert launch.stdout_has_no_reader()


def test_a_users_error_is_shown_once(tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "user_error.txt").write_text("batch.global_size=3: no")
    assert told(tmp_path, code=2) == ("megascale: batch.global_size=3: no", 2)


def test_a_stopped_rank_is_no_failure(tmp_path):
    assert told(tmp_path, seen=1, code=143) == ("megascale: rank 1 was asked to stop, and all ranks stopped with it", 143)


def test_only_the_last_logs_are_kept(tmp_path):
    for number in range(8):
        (tmp_path / f"start{number}").mkdir()
        os.utime(tmp_path / f"start{number}", ns=(number, number))
    launch._prune(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["start4", "start5", "start6", "start7"]


def test_one_rank_of_a_foreign_launcher_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MEGASCALE_PARENT", raising=False)
    launch.report_user_error("no", str(tmp_path))
    launch.report_user_error("no", str(tmp_path))
    assert capsys.readouterr().err == "megascale: no\n"


def start(tmp_path, body, *, max_restarts=0, **variables):
    """Launches ``work`` with this body on two ranks from a script of its own; returns the finished process."""
    script = f"""
import os, time
import torch.distributed as dist
from lightning_megascale.cli import launch

launch._PRELOAD = ["torch"]

def work():
    rank = int(os.environ["RANK"])
{textwrap.indent(textwrap.dedent(body), "    ")}

if __name__ == "__main__":
    launch.launch(work, ranks=2, run_dir="run", max_restarts={max_restarts}, start_method="forkserver", shutdown_seconds=5)
    print("all done")
"""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=120, check=False)


def test_rank_0_has_the_terminal_and_the_others_a_log(tmp_path):
    done = start(tmp_path, "print('rank', rank, os.environ['WORLD_SIZE'], flush=True)")
    assert (done.returncode, done.stdout) == (0, "rank 0 2\nall done\n"), done.stderr
    (log,) = (tmp_path / "run" / "logs").glob("*/attempt_0/1/stdout.log")
    assert log.read_text() == "rank 1 2\n"


def test_the_rank_that_failed_first_is_named_once(tmp_path):
    body = """
        dist.init_process_group("gloo")
        if rank == 1:
            raise RuntimeError("boom on rank 1")
        dist.barrier()
    """
    done = start(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and done.stderr.count("RuntimeError: boom on rank 1") == 1
    assert "rank 1 failed first" in done.stderr and "all done" not in done.stdout


def test_a_killed_rank_ends_the_launch(tmp_path):
    done = start(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert done.returncode == 1 and "rank 1 ended with exit code -9" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_with_its_code(tmp_path, number):
    """The parent is signalled by one of its ranks, as a terminal would do."""
    body = f"""
        import pathlib
        here = pathlib.Path({str(tmp_path)!r})
        (here / f"ready_{{rank}}").touch()  # a signal that comes while a rank still imports is another matter
        if rank == 0:
            while len(list(here.glob("ready_*"))) < 2:
                time.sleep(0.05)
            time.sleep(1)
            os.kill(int(os.environ["MEGASCALE_PARENT"]), {int(number)})
        time.sleep(60)
    """
    done = start(tmp_path, body)
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("late", [0.0, 0.3])
def test_restarted_ranks_find_each_other(tmp_path, late):
    """With one store for all attempts they would read the addresses of the last attempt (pytorch #135712)."""
    body = f"""
        import datetime
        attempt = launch.attempt()
        if rank == 1 and attempt:
            time.sleep({late})
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
        dist.barrier()
        if attempt < 2:
            if rank == 1:
                raise RuntimeError("once more")
            time.sleep(60)
        print("attempt", attempt, flush=True)
    """
    done = start(tmp_path, body, max_restarts=2)
    assert done.returncode == 0, done.stderr
    assert "attempt 2" in done.stdout

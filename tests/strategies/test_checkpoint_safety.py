"""A checkpoint is whole or not there: killed saves, full disks, dead ranks; and what a user is told."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint import files, saving
from tests.harness import RankFailure, run_ranks
from tests.strategies.test_checkpoint import Net, lightning_dict, save_under


def _fork(function: object, *args: object) -> int:
    process = multiprocessing.get_context("fork").Process(target=function, args=args)  # type: ignore[arg-type]
    process.start()
    process.join(60)
    return process.exitcode if process.exitcode is not None else 99


def _line(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_before_rename(folder: Path) -> None:
    files.commit = _die  # type: ignore[assignment]
    checkpoints.save(folder, {"global_step": 2}, _line(2.0))


def _killed_between_renames(folder: Path) -> None:
    files._exchange = lambda one, other: False  # type: ignore[assignment]
    rename = os.rename

    def second_dies(source: Path, target: Path) -> None:
        if target == folder:
            _die()
        rename(source, target)

    files.os.rename = second_dies  # type: ignore[assignment]
    checkpoints.save(folder, {"global_step": 2}, _line(2.0))


@pytest.mark.parametrize("death", [_killed_before_rename, _killed_between_renames])
def test_torn_save_leaves_a_usable_checkpoint_and_the_next_save_cleans_up(death: object, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    checkpoints.save(folder, {"global_step": 1}, _line(1.0))
    assert _fork(death, folder) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    model = _line(0.0)
    step = checkpoints.load(folder, model)["global_step"]
    assert torch.equal(model.weight, torch.full((2, 2), float(step)))  # one of the two, never a mixture
    assert step == 1 if death is _killed_before_rename else step in (1, 2)
    assert any(report.kind == "leftover" and not report.complete for report in checkpoints.list_checkpoints(tmp_path))
    checkpoints.save(folder, {"global_step": 3}, _line(3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"] and checkpoints.read_metadata(folder)["global_step"] == 3


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_folder_a_file_and_a_link(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    checkpoints.save(tmp_path / "folder", {}, _line(1.0))
    checkpoints.save(tmp_path / "folder", {}, _line(2.0))
    (tmp_path / "file").write_text("old")
    checkpoints.save(tmp_path / "file", {}, _line(2.0))
    checkpoints.save(tmp_path / "target", {}, _line(1.0))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    checkpoints.save(tmp_path / "link", {}, _line(2.0))
    for name, value in {"folder": 2.0, "file": 2.0, "target": 1.0, "link": 2.0}.items():
        model = _line(0.0)
        checkpoints.load(tmp_path / name, model)
        assert model.weight[0, 0] == value, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "target"]


def _failing_save(folder: str, where: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    model = nn.Linear(40, 500)
    fully_shard(model)
    if where == "shard" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # the disk is full for this rank: EFBIG
    if where == "meta" and rank == 0:
        saving.files.write_pickled = _no_space  # type: ignore[assignment]
    if where == "loader" and rank == 1:
        saving.files.write_pickled = _no_space  # type: ignore[assignment]
    begin = time.monotonic()
    try:
        checkpoints.save(folder, lightning_dict(rank), model, data_parallel_rank=rank)
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "saved", "", 0.0


def _no_space(content: object, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize(
    ("where", "rank", "cause"), [("shard", 1, "File too large"), ("meta", 0, "No space left"), ("loader", 1, "No space left")]
)
def test_a_rank_that_cannot_write_fails_every_rank_and_leaves_the_old_checkpoint(where: str, rank: int, cause: str, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    checkpoints.save(folder, {"global_step": 1}, _line(1.0))
    for kind, message, seconds in run_ranks(_failing_save, 2, str(folder), where, timeout=30):
        assert kind == "RuntimeError" and seconds < 20
        assert f"checkpoint {folder} was not written: rank {rank}: " in message and cause in message
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"] and checkpoints.read_metadata(folder)["global_step"] == 1


def test_check_finds_missing_cut_and_unreadable_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run_ranks(save_under, 2, "fsdp2", str(whole))

    shard = "__0_0.distcp"
    shutil.copytree(whole, tmp_path / "cut")
    with open(tmp_path / "cut" / shard, "r+b") as file:
        file.truncate(2000)
    problems = checkpoints.check(tmp_path / "cut").problems
    assert any(f"{shard} has 2,000 bytes" in problem for problem in problems) and any("is unreadable" in problem for problem in problems)
    shutil.copytree(whole, tmp_path / "gone")
    (tmp_path / "gone" / shard).unlink()
    assert f"{shard} is missing" in checkpoints.check(tmp_path / "gone").problems
    with pytest.raises(ValueError, match=rf"gone is damaged: {shard} is missing"):
        checkpoints.load(tmp_path / "gone", Net())
    shutil.copytree(whole, tmp_path / "torn")
    (tmp_path / "torn" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"torn is no checkpoint: \.metadata missing, the save was not finished"):
        checkpoints.load(tmp_path / "torn", Net())
    model = _line(1.0)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    checkpoints.save(tmp_path / "nan", {}, model)
    assert checkpoints.check(tmp_path / "nan").problems == ["weight holds NaN"]


def _load_fails(folder: str) -> str:
    try:
        checkpoints.load(folder, _line(0.0))
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_cut_file_is_named_before_loading_with_the_next_older_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(tmp_path / f"step-{step}.ckpt", {"global_step": step}, _line(float(step)))
    for step in (2, 3):
        os.truncate(tmp_path / f"step-{step}.ckpt" / "__0_0.distcp", 1000)
    (tmp_path / "last.ckpt").symlink_to("step-3.ckpt")
    one, other = run_ranks(_load_fails, 2, str(tmp_path / "last.ckpt"))
    assert one == other and "__0_0.distcp has 1,000 bytes, " in one
    assert one.endswith(f"the next older whole checkpoint is {tmp_path / 'step-1.ckpt'}")
    for write in (checkpoints.export, checkpoints.reshard_checkpoint):
        with pytest.raises(ValueError, match=r"__0_0\.distcp has 1,000 bytes"):
            write(tmp_path / "step-2.ckpt", tmp_path / "out.ckpt")


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, None])
def test_a_damaged_meta_file_is_called_damaged(content: bytes | None, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "x.ckpt", {"global_step": 1}, _line(1.0))
    meta = tmp_path / "x.ckpt" / "meta.pt"
    meta.write_bytes(meta.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ValueError, match=r"meta\.pt is unreadable .*the file is damaged") as error:
        checkpoints.read_metadata(tmp_path / "x.ckpt")
    assert "weights_only" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------- messages


def _mismatched(folder: str) -> str:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(3, 2))
    model.add_module("secnd", nn.Linear(2, 2))
    fully_shard(model)
    before = model.first.weight.full_tensor().clone()
    try:
        checkpoints.load(folder, model)
    except ValueError as error:
        assert torch.equal(model.first.weight.full_tensor(), before), "nothing may be loaded"
        return str(error)
    return "loaded"


def test_names_and_shapes_that_do_not_fit_come_in_one_message_on_all_ranks(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("second", nn.Linear(2, 2))
    checkpoints.save(tmp_path / "x.ckpt", {}, model)
    one, other = run_ranks(_mismatched, 2, str(tmp_path / "x.ckpt"))
    assert one == other
    assert "missing in the checkpoint: secnd.weight (nearest unused name there: second.weight)" in one
    assert "unexpected in the checkpoint: second.bias (nearest name without a value: secnd.bias)" in one
    assert "other shape: first.weight is (2, 3), the checkpoint has (2, 2)" in one

    partial = nn.Sequential()
    partial.add_module("first", nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="unexpected in the checkpoint: second.weight\n.*second.bias\nbuild the saved model, or set strict_loading=False"
    ):
        checkpoints.load(tmp_path / "x.ckpt", partial)
    with pytest.warns(UserWarning, match="unexpected in the checkpoint: second.weight"):
        checkpoints.load(tmp_path / "x.ckpt", partial, strict=False)
    assert torch.equal(partial.first.weight, model.first.weight)


class Own:
    """A class that torch's default unpickler does not know."""


def test_paths_and_pickled_classes_are_explained(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "good.ckpt", {}, _line(1.0))
    with pytest.raises(ValueError, match=r"there is no checkpoint .*god\.ckpt; in that folder are: good\.ckpt"):
        checkpoints.load(tmp_path / "god.ckpt", _line(0.0))
    with pytest.raises(ValueError, match="s3://bucket/x.ckpt': only paths of a .shared. file system"):
        checkpoints.save("s3://bucket/x.ckpt", {}, _line(0.0))
    checkpoints.save(tmp_path / "own.ckpt", {"hyper_parameters": {"thing": Own()}}, _line(1.0))
    with pytest.raises(ValueError, match=r"meta\.pt holds an object of tests\.strategies\.test_checkpoint_safety\.Own.*weights_only=False"):
        checkpoints.load(tmp_path / "own.ckpt", _line(0.0))
    assert isinstance(checkpoints.load(tmp_path / "own.ckpt", _line(0.0), weights_only=False)["hyper_parameters"]["thing"], Own)
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(ValueError, match=r"cut\.ckpt is unreadable"):
        checkpoints.load(tmp_path / "cut.ckpt", _line(0.0))


def _save_sharded_metadata(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        checkpoints.save(folder, {"callbacks": {"ema": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}, _line(1.0))
    except ValueError as error:
        return str(error)
    return "saved"


def test_sharded_tensors_in_the_metadata_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(_save_sharded_metadata, 2, str(tmp_path / "x.ckpt")):
        assert "checkpoint['callbacks'] holds a DTensor: only rank 0's shard of it would be saved" in message
    assert list(tmp_path.iterdir()) == []


def _rank_dies(folder: str) -> None:
    if dist.get_rank() == 1:
        saving.dcp.save = _die  # type: ignore[assignment]
    checkpoints.save(folder, {}, _line(1.0))


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure):
        run_ranks(_rank_dies, 2, str(tmp_path / "x.ckpt"), timeout=30)
    assert time.monotonic() - begin < 25
    assert not (tmp_path / "x.ckpt").exists()

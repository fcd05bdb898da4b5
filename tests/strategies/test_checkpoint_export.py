"""Export and resharding: the right bits in every format, streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_megascale.strategies import checkpoint as checkpoints


class Tied(L.LightningModule):
    def __init__(self, width: int = 4, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.ModuleDict(
            {"embed": nn.Embedding(6, width), "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 6, bias=False)}
        )
        self.model["head"].weight = self.model["embed"].weight
        self.model["low"] = nn.Linear(width, 1, dtype=torch.bfloat16)


def _saved(folder: Path) -> Tied:
    torch.manual_seed(0)
    module = Tied(5, torch.arange(3.0))
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = {
        "epoch": 1,
        "global_step": 9,
        "pytorch-lightning_version": L.__version__,
        "hparams_name": "kwargs",
        "hyper_parameters": dict(module.hparams),
        "loops": {},
        "callbacks": {},
    }
    checkpoints.save(folder, content, module, [optimizer])
    return module


def test_ckpt_opens_with_load_from_checkpoint_tied_and_with_its_hyper_parameters(tmp_path: Path) -> None:
    module = _saved(tmp_path / "x.ckpt")
    (file,) = checkpoints.export(tmp_path / "x.ckpt")
    assert file == tmp_path / "x-export.ckpt"
    again = Tied.load_from_checkpoint(file)
    assert again.hparams.width == 5 and torch.equal(again.hparams.scale, torch.arange(3.0))
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and again.state_dict()[name].dtype == tensor.dtype, name
    content = torch.load(file)
    state = content["state_dict"]
    assert state["model.head.weight"].data_ptr() == state["model.embed.weight"].data_ptr()
    assert "optimizer_states" not in content and "callbacks" not in content and content["global_step"] == 9
    checkpoints.load(file, Tied(5))  # and by load itself
    with pytest.raises(ValueError, match="exists; choose another name or remove it"):
        checkpoints.export(tmp_path / "x.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-export.ckpt", "x.ckpt"]


def test_safetensors_shards_index_and_names(tmp_path: Path) -> None:
    module = _saved(tmp_path / "x.ckpt")
    written = checkpoints.export(tmp_path / "x.ckpt", tmp_path / "out", "safetensors", shard_bytes=150)
    shards = written[:-1]
    count = len(shards)
    assert count > 1 and [shard.name for shard in shards] == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    loaded = [load_file(shard) for shard in shards]
    merged = {name: tensor for part in loaded for name, tensor in part.items()}
    expected = {name.removeprefix("model."): tensor for name, tensor in module.state_dict().items()}
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) and merged[name].dtype == expected[name].dtype for name in merged)
    index = json.loads(written[-1].read_text())
    assert index["weight_map"] == {name: shard.name for shard, part in zip(shards, loaded) for name in part}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert all(sum(t.nbytes for t in part.values()) <= 150 or len(part) == 1 for part in loaded)

    (shard, _) = checkpoints.export(tmp_path / "x.ckpt", tmp_path / "whole", "safetensors", prefix="")
    assert load_file(shard).keys() == module.state_dict().keys()
    with pytest.raises(ValueError, match=r"prefix='net\.': no name starts with it; names are model\."):
        checkpoints.export(tmp_path / "x.ckpt", tmp_path / "no", "safetensors", prefix="net.")
    with pytest.raises(ValueError, match="format='onnx': formats are ckpt, safetensors"):
        checkpoints.export(tmp_path / "x.ckpt", format="onnx")
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob("*.tmp-*"))


def test_resharding_keeps_every_bit_and_the_rest(tmp_path: Path) -> None:
    module = _saved(tmp_path / "x.ckpt")
    checkpoints.reshard_checkpoint(tmp_path / "x.ckpt", tmp_path / "y.ckpt", ranks=3)
    assert len(list((tmp_path / "y.ckpt").glob("*.distcp"))) == 3
    report = checkpoints.check(tmp_path / "y.ckpt")
    assert report.complete and report.step == 9
    again = Tied(5)
    optimizer = torch.optim.Adam(again.parameters())
    metadata = checkpoints.load(tmp_path / "y.ckpt", again, [optimizer])
    assert metadata["hyper_parameters"]["width"] == 5
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), module.state_dict().values()))
    assert torch.equal(optimizer.state[again.model["embed"].weight]["exp_avg"], torch.full((6, 5), 0.1))
    (file,) = checkpoints.export(tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="is a file checkpoint: only folders of MegascaleStrategy can be resharded"):
        checkpoints.reshard_checkpoint(file, tmp_path / "z")


_MEASURE = """
import re, sys, torch
from torch import nn
from lightning_megascale.strategies import checkpoint as checkpoints

def high_water():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

source, out, kind = sys.argv[1:]
tiny = nn.Linear(2, 2)
checkpoints.save(out + "-tiny", {}, tiny)  # whatever is imported on the way is imported now
def rewrite(source, out):
    if kind == "reshard":
        checkpoints.reshard_checkpoint(source, out)
    else:
        checkpoints.export(source, out, kind, shard_bytes=60_000_000)

rewrite(out + "-tiny", out + "-warm")
open("/proc/self/clear_refs", "w").write("5")
before = high_water()
rewrite(source, out)
print(high_water() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through Linux's /proc")
def test_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    model = nn.ModuleDict({f"l{i}": nn.Linear(1768, 1768, bias=False) for i in range(16)})  # 16 x 12.5 MB
    checkpoints.save(tmp_path / "x.ckpt", {}, model)
    freed_is_gone = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # as for tensors above 32 MB: the heap keeps no freed ones
    for kind in ("ckpt", "safetensors", "reshard"):
        command = [sys.executable, "-c", textwrap.dedent(_MEASURE), str(tmp_path / "x.ckpt"), str(tmp_path / f"out-{kind}"), kind]
        grown = int(subprocess.run(command, check=True, capture_output=True, text=True, env=freed_is_gone).stdout)
        assert grown < 40, f"{kind} grew by {grown} MB for 200 MB of tensors of 12.5 MB each"
    again = nn.ModuleDict({f"l{i}": nn.Linear(1768, 1768, bias=False) for i in range(16)})
    checkpoints.load(tmp_path / "out-ckpt", again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))

"""Host memory of a rank while it loads, saves and exports a model of 1B parameters, against its share of them.

Run: ``python -m tests.benchmarks.pretrained_memory [layers=14] [plans="fsdp2 x4,tp2 x fsdp2,pp2 x fsdp2"] [folder=DIR]``. Real gloo ranks
on this machine, bfloat16 on disk and in memory, a Llama of random weights in a temporary folder (2.1 GB, removed at the end). Counted is
VmHWM, the kernel's largest resident size, mapped files included, above what the process had before; ranks are forked, so imports are
shared. The alternative is what a script does without ``init_from``: ``from_pretrained`` on every rank, then ``fully_shard``.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import lightning as L
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import run_ranks

LIMIT = 1.3
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 x4": (4, {}),
    "tp2 x fsdp2": (4, dict(tensor_parallel_size=2)),
    "pp2 x fsdp2": (4, dict(pipeline_parallel_size=2)),
}
MIB = 2**20


def config_of(layers: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
    )


def on_meta(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(layers), dtype=torch.bfloat16)


def write_folder(folder: Path, layers: int) -> int:
    """A Hugging Face folder of random weights, one tensor in memory at a time; returns the number of parameters."""
    model = on_meta(layers)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    header, offset = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in model.state_dict().values():
            values = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.02)
            file.write(values.view(-1).view(torch.uint8).numpy())
    return offset // 2


def high_water() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def grown(work: Callable[[], Any]) -> int:
    """Bytes by which the largest resident size exceeds the present one while ``work`` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    work()
    return high_water() - before


class Tuned(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.model = layers, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = on_meta(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss  # type: ignore[misc]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def local_bytes(module: torch.nn.Module) -> int:
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in module.parameters())


def ours(folder: str, layers: int, checkpoint: str, arguments: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes of this rank's parameters, growth while loading, growth while saving)."""
    module = Tuned(layers)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=MegascaleStrategy(init_from=folder, **arguments),
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loading = grown(lambda: trainer.fit(module, DataLoader([{"input_ids": torch.zeros(8, dtype=torch.long)}] * 8)))
    saving = grown(lambda: trainer.save_checkpoint(checkpoint))
    return local_bytes(module), loading, saving


def alternative(folder: str) -> tuple[int, int, int]:
    held = []

    def load() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        held.append(model)

    return (local_bytes(held[0]), *[loading, 0]) if (loading := grown(load)) else (0, 0, 0)


def exporting(checkpoint: str, out: str) -> int:
    return grown(lambda: checkpoints.export(checkpoint, out, "safetensors"))


def measure(layers: int, plans: list[str], parent: str | None) -> tuple[Table, bool]:
    table = Table(title="host memory of the rank that needs most, MiB")
    for title in ("plan", "parameters of the rank", "loading", "ratio", "saving", "ratio"):
        table.add_column(title, justify="left" if title == "plan" else "right")
    fine = True
    with tempfile.TemporaryDirectory(dir=parent, prefix="pretrained_memory_") as name:
        folder = Path(name)
        count = write_folder(folder, layers)
        table.caption = f"{count / 1e9:.2f}B parameters, bfloat16 on disk and in memory"
        for plan in plans:
            ranks, arguments = PLANS[plan]
            results = run_ranks(ours, ranks, name, layers, str(folder / "x.ckpt"), arguments, timeout=900)
            share, loading, saving = max(results, key=lambda result: result[1] / result[0])
            saving_share = max(result[2] / result[0] for result in results)
            fine &= loading < LIMIT * share and saving_share < LIMIT - 1
            table.add_row(plan, *_row(share, loading), f"{saving / MIB:,.0f}", f"1 + {saving_share:.2f}")
            if plan != plans[-1]:
                checkpoints.remove(str(folder / "x.ckpt"))
        (grew,) = run_ranks(exporting, 1, str(folder / "x.ckpt"), str(folder / "out"), timeout=900)
        largest = 32_000 * 2048 * 2
        table.add_row("export, one process", f"largest tensor {largest / MIB:,.0f}", "", "", f"{grew / MIB:,.0f}", f"{grew / largest:.2f}")
        share, loading, _ = max(run_ranks(alternative, 2, name, timeout=900), key=lambda result: result[1])
        table.add_row("from_pretrained, then fully_shard, x2", *_row(share, loading), "", "")
    return table, fine


def _row(share: int, loading: int) -> tuple[str, str, str]:
    return f"{share / MIB:,.0f}", f"{loading / MIB:,.0f}", f"{loading / share:.2f}"


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments)
    plans = options.get("plans", ",".join(PLANS)).split(",")
    table, fine = measure(int(options.get("layers", 14)), plans, options.get("folder"))
    Console(width=140).print(table)
    print(f"every rank below {LIMIT} times its share: {'yes' if fine else 'NO'}")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

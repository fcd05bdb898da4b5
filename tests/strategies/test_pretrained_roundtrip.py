"""Hugging Face folder -> any plan -> three steps -> checkpoint -> export -> ``from_pretrained``: the numbers of one device all the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch.plugins import DoublePrecision
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint.pretrained import open_pretrained
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import full, run_ranks, worst
from tests.huggingface import FAMILIES, ROWS, HuggingFaceModule, batches

STEPS = 3
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, data-parallel ranks, arguments
    "one": (1, 1, {}),
    "fsdp2": (2, 2, {}),
    "tp2": (2, 1, dict(tensor_parallel_size=2)),
    "pp2": (2, 1, dict(pipeline_parallel_size=2)),
    "fsdp2 x tp2": (4, 2, dict(tensor_parallel_size=2)),
    "pp2 x fsdp2": (4, 2, dict(pipeline_parallel_size=2)),
}
EXPERT_PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ep2": (2, 2, dict(expert_parallel_size=2)),
    "fsdp2 x tp2, ep4": (4, 2, dict(tensor_parallel_size=2, expert_parallel_size=4)),
}
EXPERT_FAMILIES = ("Mixtral", "Qwen3Moe", "DeepseekV3")
AUTO = {
    "GPT2": transformers.AutoModelForCausalLM,
    "Llava": transformers.AutoModelForImageTextToText,
    "CLIP": transformers.AutoModel,
    "Siglip": transformers.AutoModel,
}


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' causal loss without its cast to float32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tied_llama() -> nn.Module:
    config = FAMILIES["Llama"]().config
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


BUILD: dict[str, Callable[[], nn.Module]] = {**FAMILIES, "Llama tied": tied_llama}


class Tuned(HuggingFaceModule):
    """Built on the meta device, where nothing but what the folder brings can give it values.

    SGD: transformers' norms round to float32 within, so a gradient whose 1/N comes after the backward (several microbatches, that is a
    pipeline) differs in its eighth digit; Adam would blow that up where gradients are small.
    """

    def __init__(self, family: str) -> None:
        L.LightningModule.__init__(self)
        self.family, self.model = family, None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = BUILD[self.family]()
            self.model.loss_function = exact_loss


def trained(family: str, folder: str, plan: str, checkpoint: str) -> dict[str, Tensor]:
    """Three steps from the folder's weights under a plan; the whole state afterwards."""
    ranks, shares, arguments = {**PLANS, **EXPERT_PLANS}[plan]
    L.seed_everything(7)
    module = Tuned(family)
    rows = [{key: value[row] for key, value in batch.items()} for batch in batches(family, STEPS) for row in range(ROWS)]
    strategy = MegascaleStrategy(init_from=folder, label_alignment="shift", **arguments)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, plugins=[DoublePrecision()], max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    start = 0 if shares == 1 else torch.distributed.get_rank() // (ranks // shares if "pp2" not in plan else 1) % shares
    share = ROWS // shares
    own = [rows[step * ROWS + start * share + row] for step in range(STEPS) for row in range(share)]
    trainer.fit(module, DataLoader(own, batch_size=share))
    assert trainer.strategy.data_parallel_rank == start
    trainer.save_checkpoint(checkpoint)
    return {name: full(tensor) for name, tensor in module.state_dict().items()}


def reference(family: str, folder: Path) -> nn.Module:
    """The same three steps by hand."""
    kind = AUTO.get(family, transformers.AutoModelForCausalLM)
    given = batches(family, STEPS)
    torch.set_default_dtype(torch.float64)
    try:
        module = Tuned(family)
        module.model = kind.from_pretrained(folder, dtype=torch.float64)
        if family == "Llava":
            module.model.model.vision_tower.requires_grad_(False)
        module.model.config._experts_implementation = "eager"
        module.model.loss_function = exact_loss
        optimizer = module.configure_optimizers()
        module.train()
        for batch in given:
            module.training_step(_double(batch), 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    return module.model


def _double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def logits(model: nn.Module, family: str) -> Tensor:
    batch = {key: value for key, value in _double(batches(family, 1)[0]).items() if key != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as transformers writes them, made on first use."""

    class Made(dict):
        def __missing__(self, family: str) -> Path:
            torch.manual_seed(3)
            self[family] = tmp_path_factory.mktemp("folder") / family.replace(" ", "_")
            BUILD[family]().double().save_pretrained(self[family])
            return self[family]

    return Made()


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, nn.Module]:
    class Made(dict):
        def __missing__(self, family: str) -> nn.Module:
            self[family] = reference(family, folders[family])
            return self[family]

    return Made()


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_every_family_in_and_out(family: str, tmp_path: Path) -> None:
    """Without ranks: what transformers writes is read, and what it would write is written."""
    torch.manual_seed(3)
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "in")
    module = L.LightningModule()
    with torch.device("meta"):
        module.model = FAMILIES[family]()
    found = open_pretrained(tmp_path / "in", module, "model")
    found.reserve(module, torch.device("cpu"))
    found.fill(module)
    assert worst(model.state_dict(), module.model.state_dict())[0] == 0
    checkpoints.save(tmp_path / "x.ckpt", {}, module)
    checkpoints.export(tmp_path / "x.ckpt", tmp_path / "out", "safetensors")
    _as_transformers_writes(model, tmp_path, "float32")
    again, notes = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(notes.values()) and worst(model.state_dict(), again.state_dict())[0] == 0


DEFAULT = [
    ("Llama tied", "pp2"), ("Qwen3", "tp2"), ("GPT2", "fsdp2"), ("Mixtral", "fsdp2"), ("Mixtral", "ep2"),
]  # fmt: skip
SLOW = [
    (family, plan)
    for family in ("Llama", "Llama tied", "Qwen3", "GPT2", "Llava", *EXPERT_FAMILIES)
    for plan in (*PLANS, *(EXPERT_PLANS if family in EXPERT_FAMILIES else ()))
    if (family, plan) not in DEFAULT
]


@pytest.mark.parametrize(("family", "plan"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_round_trip(family: str, plan: str, folders: dict[str, Path], references: dict[str, nn.Module], tmp_path: Path) -> None:
    states = run_ranks(
        trained, {**PLANS, **EXPERT_PLANS}[plan][0], family, str(folders[family]), plan, str(tmp_path / "x.ckpt"), timeout=120
    )
    checkpoints.export(tmp_path / "x.ckpt", tmp_path / "out", "safetensors", shard_bytes=20_000)
    kind = AUTO.get(family, transformers.AutoModelForCausalLM)
    model, notes = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(notes.values()), notes
    assert model.dtype == torch.float64 and type(model) is type(references[family])
    model.config._experts_implementation = "eager"
    whole = {name.removeprefix("model."): value for state in states for name, value in state.items()}  # a pipeline's rank has some
    off, name = worst(whole, model.state_dict())
    keeps_float32 = family == "DeepseekV3"  # of its routers, which from_pretrained rounds therefore
    assert off <= (1e-7 if keeps_float32 else 0), f"{name}: exported weights differ from the trained ones by {off}"
    tolerance = 1e-6 if "pp" in plan or keeps_float32 else 1e-10
    off, name = worst(references[family].state_dict(), model.state_dict())
    assert off < tolerance, f"{name}: off by {off} from the three steps on one device"
    trained_model = kind.from_config(model.config, dtype=torch.float64)
    trained_model.load_state_dict(whole)
    assert keeps_float32 or torch.equal(logits(model, family), logits(trained_model, family))
    difference = (logits(model, family) - logits(references[family], family)).abs().max().item()
    assert difference < 100 * tolerance, difference
    del model._weight_conversions  # as of one that was built from a config
    _as_transformers_writes(model, tmp_path, "float64")


def _as_transformers_writes(model: nn.Module, folder: Path, dtype: str) -> None:
    """The same names, shapes and config as ``save_pretrained``."""
    model.save_pretrained(folder / "theirs")
    assert _shapes(folder / "out") == _shapes(folder / "theirs")
    ours, theirs = (json.loads((folder / name / "config.json").read_text()) for name in ("out", "theirs"))
    assert ours.pop("dtype") == theirs.pop("dtype") == dtype
    assert ours["architectures"] == theirs["architectures"] == [type(model).__name__]


def _shapes(folder: Path) -> dict[str, list[int]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            found.update({name: handle.get_slice(name).get_shape() for name in handle.keys()})  # noqa: SIM118
    return found

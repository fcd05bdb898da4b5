"""Who sees which rows, what metrics reduce over, and Lightning's own loops: validation, prediction, schedules, early stopping."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_megascale import MegascaleStrategy
from tests.harness import run_ranks
from tests.strategies.test_existing_code import CallsModel, Tokens

QUIET: dict[str, Any] = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False)
TP2 = dict(tensor_parallel_size=2, layout=dict(colwise=["layers.*.up"], rowwise=["layers.*.down"]))


class Numbered(Dataset):
    """Row i says i, and what its worker drew."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((6,), index % 5)
        return {"input_ids": ids, "labels": ids, "index": torch.tensor(index), "noise": torch.tensor(np.random.rand())}


class Notes(CallsModel):
    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []
        self.noise: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.indices += batch["index"].tolist()
        self.noise += batch["noise"].tolist()
        return super().training_step(batch, batch_idx)


def rows_seen(workers: int) -> dict[str, Any]:
    """Lightning injects its sampler and seeds the workers itself here."""
    os.environ["PL_SEED_WORKERS"], os.environ["PL_GLOBAL_SEED"] = "1", "3"
    module = Notes()
    strategy = MegascaleStrategy(label_alignment="aligned", **TP2)
    trainer = L.Trainer(**QUIET, devices=4, max_epochs=1, enable_checkpointing=False, strategy=strategy)
    trainer.fit(module, DataLoader(Numbered(), batch_size=4, num_workers=workers))
    return {"indices": module.indices, "noise": module.noise, "share": strategy.data_parallel_rank}


def check_peers_and_union(workers: int = 0) -> None:
    results = run_ranks(rows_seen, 4, workers)
    by_share: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        by_share.setdefault(result["share"], []).append(result)
    assert sorted(by_share) == [0, 1]
    for peers in by_share.values():
        assert peers[0]["indices"] == peers[1]["indices"], "tensor-parallel peers see different rows"
        if workers:
            assert peers[0]["noise"] == peers[1]["noise"], "tensor-parallel peers augment differently"
    assert sorted(by_share[0][0]["indices"] + by_share[1][0]["indices"]) == list(range(16)), "the shares are not the data set"
    if workers:
        assert by_share[0][0]["noise"][:4] != by_share[1][0]["noise"][:4], "different shares must not augment alike"


@pytest.mark.parametrize("workers", [0, 1])
def test_tensor_parallel_peers_see_the_same_rows(workers: int) -> None:
    check_peers_and_union(workers)


class Measured(CallsModel):
    """Validation, test, prediction, a schedule and reductions."""

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.log("val/loss", loss, sync_dist=True, batch_size=int((batch["labels"] != -100).sum()))
        self.log("val/rows", float(len(batch["input_ids"])), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch["input_ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run_loops(arguments: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    ours = arguments is not None
    ranks = int(os.environ["WORLD_SIZE"]) if ours else 1
    strategy: Any = MegascaleStrategy(label_alignment="aligned", **(arguments or {})) if ours else "auto"
    stopping = EarlyStopping("val/loss", patience=1, min_delta=0.004)
    keeping = ModelCheckpoint(folder, monitor="val/loss", filename="{epoch}", save_top_k=1, auto_insert_metric_name=False)
    trainer = L.Trainer(
        **QUIET, devices=ranks, max_epochs=4, strategy=strategy, callbacks=[stopping, keeping], use_distributed_sampler=False
    )
    module = Measured()

    class Data(L.LightningDataModule):
        def loader(self) -> DataLoader:
            count = strategy.data_parallel_size if ours else 1
            rank = strategy.data_parallel_rank if ours else 0
            rows = [Tokens()[i] for i in range(rank, len(Tokens()), count)]
            return DataLoader(rows, batch_size=8 // count)  # type: ignore[arg-type]

        train_dataloader = val_dataloader = predict_dataloader = loader

    data = Data()
    trainer.fit(module, data)
    predicted = torch.cat(trainer.predict(module, data))
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": os.path.basename(keeping.best_model_path),
        "epochs": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "predicted": predicted,
        "share": strategy.data_parallel_rank if ours else 0,
    }


@pytest.mark.parametrize("arguments", [dict(data_parallel_replicate_size=2), dict(), TP2], ids=["dp2", "fsdp2", "tp2"])
def test_loops_callbacks_and_schedules_equal_one_device(arguments: dict[str, Any], tmp_path: Any) -> None:
    reference = run_loops(None, str(tmp_path / "one"))
    results = run_ranks(run_loops, 2, arguments, str(tmp_path / "two"), timeout=90)
    for result in results:
        assert result["metrics"].keys() == reference["metrics"].keys()
        for name, value in reference["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, abs=1e-10), name
        assert (result["best"], result["epochs"], result["lr"]) == (reference["best"], reference["epochs"], reference["lr"])
    shares = {result["share"]: result["predicted"] for result in results}
    whole = torch.empty_like(reference["predicted"])
    for share, predicted in shares.items():
        whole[share :: len(shares)] = predicted
    assert torch.equal(whole, reference["predicted"])


def reductions() -> dict[str, Any]:
    strategy = MegascaleStrategy(label_alignment="aligned", **TP2)
    trainer = L.Trainer(**QUIET, devices=4, max_steps=1, enable_checkpointing=False, strategy=strategy)
    trainer.fit(CallsModel(), DataLoader(Tokens(), batch_size=2))
    share = torch.tensor(float(strategy.data_parallel_rank + 1))
    only_first = torch.distributed.get_rank() == 0
    return {
        "sum": strategy.reduce(share.clone(), reduce_op="sum").item(),
        "mean": strategy.reduce(share.clone(), reduce_op="mean").item(),
        "mean of whole numbers": strategy.reduce(torch.tensor(21 + strategy.data_parallel_rank), reduce_op="mean").item(),
        "gathered": strategy.all_gather(share).flatten().tolist(),
        "all": strategy.reduce_boolean_decision(not only_first, all=True),
        "any": strategy.reduce_boolean_decision(only_first, all=False),
    }


def test_reductions_count_every_row_once_and_decisions_bind_all_ranks() -> None:
    for result in run_ranks(reductions, 4):
        assert result == {"sum": 3.0, "mean": 1.5, "mean of whole numbers": 21.5, "gathered": [1.0, 2.0], "all": False, "any": True}

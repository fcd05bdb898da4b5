"""share="model": one rank of a model replica reads for all, and nothing else changes; no rank is left waiting."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import webdataset as wds
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megascale.data.encode import count_tokens, encode_sample
from lightning_megascale.data.image_text import ImageTextDataModule
from lightning_megascale.data.ragged import Ragged
from lightning_megascale.data.sharing import Replica, SharedLoader, Withheld, pack, unpack
from lightning_megascale.layout import ModelLayout
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.data.chat import IMAGE, make_tokenizer
from tests.data.mixes import QUIET, STAGES, module, sources
from tests.data.test_mixture_with_strategy import MODEL, Recorder
from tests.harness import run_ranks

PLANS: dict[str, tuple[dict[str, Any], int]] = {  # and how many read
    "tp2 x dp2": ({"tensor_parallel_size": 2}, 2),
    "pp2 x dp2": ({"pipeline_parallel_size": 2, "microbatch_size": 2}, 2),
    "cp2 x dp2": ({"context_parallel_size": 2, "label_alignment": "shift"}, 2),
    "pp2 x tp2": ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatch_size": 2}, 1),
}
STEPS, RESUMED_AT = 5, 3
ENCODED: list[str] = []  # keys that this process has encoded


def encode(sample: dict[str, Any], context: Any) -> dict[str, Any]:
    """Counts; draws from torch's global generator, as encode functions should not."""
    ENCODED.append(sample["__key__"])
    torch.rand(1)
    return encode_sample(sample, context)


encode.count = count_tokens  # type: ignore[attr-defined]
encode.version = "1"  # type: ignore[attr-defined]


# ---- text under every axis --------------------------------------------------------------------------------------------------------------


class Twice(Recorder):
    """Validates in the middle of its training, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.__dict__.setdefault("validated", []).append(batch["__key__"])


def train(share: str, folder: str, urls: dict[str, Any], plan: dict[str, Any], resume: str | None = None, steps: int = STEPS) -> Any:
    warnings.simplefilter("ignore")
    ENCODED.clear()
    torch.manual_seed(0)
    recorder = Twice(MODEL, optimizer={"lr": 1e-2}, schedule={"warmup_steps": 1, "total_steps": 64})
    own = {name: {"urls": url, "fields": {"text": "txt"}, "encode": encode} for name, url in urls.items()}
    data = module(own, Path(folder), STAGES, rows="packed", batch_size=4, packing_window=32, share=share, validation={"b": own["b"]})
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=MegascaleStrategy(**plan),
        max_steps=steps,
        max_epochs=1,
        val_check_interval=2,
        limit_val_batches=2,
        logger=False,
        callbacks=[ModelCheckpoint(folder, filename=f"{share}", every_n_train_steps=RESUMED_AT, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, data, ckpt_path=resume)
    return {
        "rows": recorder.rows,
        "losses": recorder.losses,
        "validated": recorder.validated,
        "loss": float(trainer.callback_metrics["val/loss"]),
        "encoded": len(ENCODED),
        "position": data.position,
        "drawn": torch.rand(1).item(),
    }


def both(folder: str, urls: dict[str, Any], plan: dict[str, Any]) -> list[Any]:
    """Apart, shared, and shared from a checkpoint of the shared run."""
    runs = [train(share, folder, urls, plan) for share in ("none", "model")]
    return [*runs, train("model", folder, urls, plan, f"{folder}/model.ckpt")]


@pytest.mark.parametrize("name", [*list(PLANS)[:3], pytest.param("pp2 x tp2", marks=pytest.mark.slow)])
def test_one_rank_of_a_replica_reads_and_the_numbers_stay(name: str, tmp_path: Path) -> None:
    make_tokenizer()
    plan, readers = PLANS[name]
    ranks = run_ranks(both, 4, str(tmp_path), sources(tmp_path), plan, timeout=120)
    for apart, shared, resumed in ranks:
        assert apart["encoded"] > 0 and len(apart["losses"]) == STEPS and len(apart["validated"]) >= 4
        for key in ("rows", "losses", "validated", "loss", "position"):
            assert shared[key] == apart[key], key
        assert resumed["rows"] == apart["rows"][RESUMED_AT:] and resumed["losses"] == apart["losses"][RESUMED_AT:]
        assert resumed["position"] == apart["position"]
    assert sum(shared["encoded"] > 0 for _, shared, _ in ranks) == sum(resumed["encoded"] > 0 for *_, resumed in ranks) == readers
    assert max(shared["encoded"] for _, shared, _ in ranks) == ranks[0][0]["encoded"]


# ---- pictures ---------------------------------------------------------------------------------------------------------------------------

SIZE, PATCH = 8, 4
LAYOUT = ModelLayout(
    first=["vision", "embed"], blocks="layers.*", last="head", colwise="layers.*.up", rowwise="layers.*.down", first_inputs="pixel_values"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.down(F.gelu(self.up(x_BLD)))


class Seeing(nn.Module):
    """Each row begins with its picture's brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision, self.head = nn.Embedding(320, 8), nn.Linear(3 * SIZE * SIZE, 8), nn.Linear(8, 320)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x_BLD = self.embed(input_ids)
        if pixel_values is not None:
            x_BLD = x_BLD + self.vision(pixel_values.flatten(1))[:, None]
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(x_BLD)


class Watcher(LightningModule):
    """A step that hands pictures on, or looks at them on every stage; keeps what came."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.net, self.looks = Seeing(), looks
        self.came: list[Any] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        pixels = batch["pixel_values"].values
        if self.looks:
            pixels = pixels / 2
        logits_BLV = self.net(batch["input_ids"], pixel_values=pixels)
        return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.came.append(seen(batch["pixel_values"]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.strategy.step_loss))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Looking(Recorder):
    """A decoder that takes no pictures; notes those that came."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.__dict__.setdefault("came", []).append(seen(batch["pixel_values"]))


def seen(pixels: Any) -> Any:
    """How many, and what of them."""
    return (pixels.counts.tolist(), float(pixels.values.double().sum())) if isinstance(pixels, Ragged) else type(pixels).__name__


def captions(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    with wds.TarWriter(str(folder / "caption-000.tar"), mtime=0) as tar:
        for number in range(24):
            file = io.BytesIO()
            Image.fromarray(np.full((9, 11, 3), 10 * number, np.uint8)).save(file, "PNG")
            tar.write({"__key__": f"caption{number:03d}", "png": file.getvalue(), "txt": f"{IMAGE}a red square"})
    return str(folder / "caption-*.tar")


def look(share: str, folder: str, urls: str, plan: dict[str, Any], rows: str, looks: bool = False) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    options: dict[str, Any] = dict(image_size=SIZE, image_patch=PATCH, cache_dir=Path(folder) / "cache", num_workers=1, share=share)
    data = ImageTextDataModule({"c": urls}, None, make_tokenizer(), 32, 4, rows=rows, packing_window=16, lanes=4, **options)
    watcher: Any = Watcher(looks) if rows == "padded" else Looking(MODEL, optimizer={"lr": 1e-2})
    strategy = MegascaleStrategy(**plan, layout=LAYOUT if rows == "padded" else "auto")
    given = {**QUIET, "default_root_dir": folder, "devices": dist.get_world_size(), "max_steps": 2}
    Trainer(strategy=strategy, **given).fit(watcher, data)
    return {"came": watcher.came, "losses": watcher.losses}


def look_thrice(*args: Any) -> Any:
    return [look(share, *args) for share in ("none", "model", "model")]  # groups are made anew for a second Trainer


@pytest.mark.parametrize(
    ("plan", "rows", "blind"),
    [
        ({"pipeline_parallel_size": 2, "microbatch_size": 2, "label_alignment": "shift", "placement": [0, 2, 1, 3]}, "padded", (1, 3)),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatch_size": 2, "label_alignment": "shift"}, "padded", (2, 3)),
        ({"context_parallel_size": 2, "label_alignment": "shift"}, "packed", ()),
    ],
    ids=["pp2 x dp2", "pp2 x tp2", "cp2 x dp2"],
)
def test_pictures_go_where_they_are_looked_at(plan: dict[str, Any], rows: str, blind: tuple[int, ...], tmp_path: Path) -> None:
    """The second pipeline stage gets none; the numbers stay."""
    make_tokenizer()
    ranks = run_ranks(look_thrice, 4, str(tmp_path), captions(tmp_path / "shards"), plan, rows, timeout=120)
    for rank, (apart, shared, again) in enumerate(ranks):
        assert shared == again and shared["losses"] == apart["losses"] and len(apart["losses"]) == 2
        assert len(apart["came"]) == 2 and all(sum(counts) >= 4 for counts, _ in apart["came"])
        assert shared["came"] == (["Withheld"] * 2 if rank in blind else apart["came"])


def look_where_none_are(*args: Any) -> str:
    with pytest.raises(ValueError) as caught:
        look("model", *args, "padded", True)
    return str(caught.value)


def test_a_step_that_reads_what_its_stage_is_not_sent_is_told_so(tmp_path: Path) -> None:
    plan = {"pipeline_parallel_size": 2, "microbatch_size": 2, "label_alignment": "shift"}
    make_tokenizer()
    for text in run_ranks(look_where_none_are, 2, str(tmp_path), captions(tmp_path / "shards"), plan, timeout=120):
        assert "batch['pixel_values'] was not sent to this rank" in text and "share='none'" in text


# ---- errors -----------------------------------------------------------------------------------------------------------------------------


def encode_until(sample: dict[str, Any], context: Any) -> dict[str, Any]:
    ENCODED.append(sample["__key__"])
    if len(ENCODED) > 8:
        raise OSError("the disk is gone")
    return encode_sample(sample, context)


encode_until.count = count_tokens  # type: ignore[attr-defined]


def fail(folder: str, urls: dict[str, Any]) -> tuple[str, str]:
    own = {name: {"urls": url, "fields": {"text": "txt"}, "encode": encode_until} for name, url in urls.items()}
    data = module(own, Path(folder), STAGES, batch_size=4, share="model")
    given = {**QUIET, "devices": dist.get_world_size(), "max_steps": 5}
    trainer = Trainer(strategy=MegascaleStrategy(tensor_parallel_size=2), **given)
    try:
        trainer.fit(Recorder(MODEL), data)
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__, str(error)
    return "", ""


def test_what_stops_the_reader_stops_its_peers_in_its_words(tmp_path: Path) -> None:
    make_tokenizer()
    ranks = run_ranks(fail, 4, str(tmp_path), sources(tmp_path), timeout=120)
    for rank, (kind, text) in enumerate(ranks):
        reader = rank // 2 * 2
        assert kind == "OSError" and f"rank {reader}, which reads for ranks [{reader}, {reader + 1}]: source " in text
        assert text.endswith("the disk is gone") and text == ranks[reader][1]


# ---- the loader alone -------------------------------------------------------------------------------------------------------------------


class Loader:
    """Batches of one's own; counts how often it was begun."""

    def __init__(self, batches: list[Any], error: Exception | None = None, length: int | None = None) -> None:
        self.batches, self.error, self.length, self.begun, self.epochs = batches, error, length, 0, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.batches) if self.length is None else self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        self.begun += 1
        torch.rand(3)
        yield from self.batches
        if self.error is not None:
            raise self.error


class Its:
    """As little of a trainer as is needed."""

    def __init__(self, replica: Replica | None) -> None:
        self.strategy, self.model_replica = self, replica


def numbered(count: int) -> list[Any]:
    return [{"input_ids": torch.full((2, 3), number), "__key__": [[str(number)], []]} for number in range(count)]


def begin_stop_and_begin_again() -> Any:
    """Stops early, reads a second loader in between, then reads all, and past the end."""
    replica, train_batches, others = Replica(dist.group.WORLD, 1), Loader(numbered(5)), Loader(numbered(2))
    loader, other = (SharedLoader(one, Its(replica), name) for one, name in ((train_batches, "a"), (others, "b")))  # type: ignore[arg-type]
    before = torch.get_rng_state()
    first = iter(loader)
    got = [next(first)["__key__"], [batch["__key__"] for batch in other], next(first)["__key__"]]
    del first
    got.append([batch["input_ids"].sum().item() for batch in loader])
    loader.sampler.set_epoch(3)
    assert train_batches.epochs == [3] and torch.equal(before, torch.get_rng_state()) and len(loader) == 5
    assert (train_batches.begun, others.begun) == ((2, 1) if dist.get_rank() == 1 else (0, 0))
    return got


def test_loaders_stop_early_take_turns_and_draw_nothing() -> None:
    expected = [[["0"], []], [[["0"], []], [["1"], []]], [["1"], []], [0, 6, 12, 18, 24]]
    assert run_ranks(begin_stop_and_begin_again, 3) == [expected] * 3


def stopped(case: str) -> str:
    rank = dist.get_rank()
    made = {
        "value": lambda: Loader(numbered(1), ValueError("12 bad samples")),
        "other": lambda: Loader(numbered(1), KeyError("txt")),
        "cannot be sent": lambda: Loader([*numbered(1), {"input_ids": lambda: 0}]),
        "lengths": lambda: Loader(numbered(1 + rank)),
    }[case]()
    count = 0
    try:
        for _ in SharedLoader(made, Its(Replica(dist.group.WORLD, 0)), "training"):  # type: ignore[arg-type]
            count += 1
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{count} {type(error).__name__}: {error}"
    return f"{count} without an error"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("value", "1 ValueError: rank 0, which reads for ranks [0, 1]: 12 bad samples"),
        ("other", "1 RuntimeError: KeyError: rank 0, which reads for ranks [0, 1]: 'txt'"),
        ("cannot be sent", "which reads for ranks [0, 1]: "),
        ("lengths", "0 ValueError: the ranks of a model replica begin to read different loaders under share='model': rank 0: training, 1 "),
    ],
)
def test_all_stop_with_the_same_words(case: str, words: str) -> None:
    one, other = run_ranks(stopped, 2, case)
    assert one == other and words in one


def test_alone_it_reads_for_itself() -> None:
    loader = Loader(numbered(3))
    for trainer in (None, Its(None), object()):
        assert [batch["__key__"][0] for batch in SharedLoader(loader, trainer, "training")] == [["0"], ["1"], ["2"]]  # type: ignore[arg-type]
    assert loader.begun == 3


def test_other_values_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share='all': must be one of none, model"):
        module({"a": "x.tar"}, tmp_path, share="all")


# ---- messages ---------------------------------------------------------------------------------------------------------------------------


def test_a_batch_comes_out_as_it_went_in() -> None:
    pixels = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
    batch = {
        "input_ids": torch.arange(6).reshape(2, 3).t(),
        "mask": torch.tensor([True, False, True]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "nothing": torch.empty(0, 3, 8, 8, dtype=torch.uint8),
        "pixel_values": Ragged(pixels, torch.tensor([1, 0, 1])),
        "array": np.arange(3, dtype=np.int16),
        "__key__": [["a", "b"], [], ["ü"]],
        "max_seqlen": 7,
    }
    got = unpack(*pack(batch))
    assert list(got) == list(batch) and got["__key__"] == batch["__key__"] and got["max_seqlen"] == 7
    for key in ("input_ids", "mask", "half", "scalar", "nothing"):
        wanted: Any = batch[key]
        assert torch.equal(got[key], wanted) and got[key].dtype == wanted.dtype and got[key].shape == wanted.shape, key
    assert torch.equal(got["pixel_values"].values, pixels) and got["pixel_values"].counts.tolist() == [1, 0, 1]
    assert got["array"].tolist() == [0, 1, 2] and got["array"].dtype == np.int16
    weight = torch.ones(3, requires_grad=True)
    product = (weight * got["half"]).sum()
    got["mask"].fill_(False)  # no change of "half", as autograd sees it
    product.backward()
    assert got["half"].item() == 1.5


def test_what_was_withheld_can_be_handed_on_and_nothing_else() -> None:
    withheld = Withheld("pixel_values", torch.tensor([1, 0, 2]))
    assert withheld.values is withheld and withheld.to("cpu", non_blocking=True) is withheld and withheld.counts.tolist() == [1, 0, 2]  # type: ignore[union-attr]
    for other in (copy.copy(withheld), copy.deepcopy(withheld), unpack(*pack(withheld))):
        assert other.name == "pixel_values" and other.counts.tolist() == [1, 0, 2]
    uses: list[Any] = [
        lambda: withheld[0],
        lambda: withheld * 2,
        lambda: 2 - withheld,
        lambda: torch.ones(3) + withheld,
        lambda: torch.cat([withheld, withheld]),
        lambda: F.linear(withheld, torch.ones(2, 2)),
        lambda: list(withheld),
        lambda: len(withheld),
        lambda: np.asarray(withheld),
        lambda: withheld.shape,
        lambda: bool(withheld),
    ]
    for use in uses:
        with pytest.raises((ValueError, AttributeError), match=r"batch\['pixel_values'\] was not sent to this rank"):
            use()
    assert not hasattr(withheld, "shape")

"""``init_from``: each rank reads its own part and nothing else; what does not fit is one message on all ranks; resumes leave it alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.module import MegascaleModule
from lightning_megascale.parallel.init import local_bounds
from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint import hub, pretrained, safetensors_folder
from lightning_megascale.strategies.checkpoint.pretrained import open_pretrained
from lightning_megascale.strategies.checkpoint.safetensors_folder import SafetensorsFolder
from lightning_megascale.strategies.checkpoint.views import Stored
from lightning_megascale.strategies.checkpoint.weight_names import names_for_loading
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import RankFailure, full, run_ranks, worst
from tests.huggingface import FAMILIES

CONFIG = DecoderConfig(vocab_size=40, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_position_embeddings=16)


def llama() -> nn.Module:
    return FAMILIES["Llama"]()


class Causal(L.LightningModule):
    """A Llama under the name ``net``, on the meta device, and a head of the user's own beside it."""

    def __init__(self, kind: str = "Llama", beside: bool = False, shards_itself: bool = False) -> None:
        super().__init__()
        self.kind, self.beside, self.shards_itself, self.net = kind, beside, shards_itself, None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = FAMILIES[self.kind]()
            if self.beside:
                self.probe = nn.Linear(32, 1)
            if self.shards_itself:
                for layer in self.net.model.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.net(**batch, output_hidden_states=self.beside)
        return output.loss + (self.probe(output.hidden_states[-1]).mean() if self.beside else 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(init_from: Any, steps: int = 0, **plan: Any) -> L.Trainer:
    strategy = MegascaleStrategy(init_from=init_from, label_alignment="shift", **plan)
    return L.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def loader(rows: int = 4) -> DataLoader:
    ids = torch.arange(rows * 8).view(rows, 8) % 40
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=1)


def fitted(module: L.LightningModule, init_from: Any, strict: bool = True, **plan: Any) -> dict[str, Tensor]:
    """The module's whole state after a fit of no steps."""
    L.seed_everything(3)
    module.strict_loading = strict
    trainer_of(init_from, **plan).fit(module, loader())
    return {name: full(tensor) for name, tensor in module.state_dict().items()}


# ---- reading pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 64, 2**20])
def test_any_piece_in_any_dtype(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_folder, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(7, 5, generator=generator),
        "cube": torch.randn(4, 6, 10, generator=generator, dtype=torch.float64),
        "half": torch.randn(9, 2, generator=generator).bfloat16(),
        "row": torch.arange(11),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    for name, tensor in tensors.items():
        for _ in range(12):
            bounds = []
            for length in tensor.shape:
                low, high = sorted(torch.randint(0, length + 1, (2,), generator=generator).tolist())
                bounds.append((low, high))
            expected = tensor[tuple(slice(*bound) for bound in bounds)]
            wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
            for out in (torch.empty(expected.shape, dtype=tensor.dtype), torch.empty(expected.shape[::-1], dtype=wide).movedim(0, -1)):
                out = out if out.shape == expected.shape else torch.empty(expected.shape, dtype=wide)
                folder.read(name, bounds, out)
                assert torch.equal(out, expected.to(out.dtype)), (name, bounds)
    folder.close()


def bounds_are_the_local_parts() -> None:
    """Of uneven tensors under FSDP2, tensor parallelism in each dim, and FSDP2 over it."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    for name, (rows, columns) in {"a": (7, 6), "b": (6, 9), "c": (1, 3)}.items():
        setattr(model, name, nn.Linear(columns, rows))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.a.weight = nn.Parameter(distribute_tensor(model.a.weight.data, mesh["tp"], [Shard(0)]))
    model.b.weight = nn.Parameter(distribute_tensor(model.b.weight.data, mesh["tp"], [Shard(1)]))
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        part = whole[name][tuple(slice(*bound) for bound in local_bounds(parameter))]
        assert torch.equal(part, parameter.to_local()), name


def test_bounds_are_the_local_parts() -> None:
    run_ranks(bounds_are_the_local_parts, 4)


def test_a_piece_of_fused_experts_reads_only_its_experts(tmp_path: Path) -> None:
    model = FAMILIES["Mixtral"]()
    model.save_pretrained(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    stored = {name: Stored(name, tensor.shape) for name, tensor in folder.tensors.items()}
    views, unexpected = names_for_loading(model, stored, model.state_dict())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not unexpected and views.keys() == model.state_dict().keys()
    asked: list[str] = []

    def read(name: str, bounds: Any, out: Tensor) -> None:
        asked.append(name)
        folder.read(name, bounds, out)

    whole = model.state_dict()[name]
    experts, doubled, width = whole.shape
    out = torch.empty(1, doubled // 2, width)
    views[name].read(((2, 3), (doubled // 4, doubled * 3 // 4), (0, width)), out, read)  # half of the gate's rows and half of up's
    assert torch.equal(out, whole[2:3, doubled // 4 : doubled * 3 // 4])
    assert asked == [f"model.layers.1.block_sparse_moe.experts.2.w{number}.weight" for number in (1, 3)]


# ---- what does not fit -------------------------------------------------------------------------------------------------------


def edited(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def cut(folder: Path, size: int) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(size)


def only(folder: Path, **files: str) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def in_two_files(folder: Path, *, lost: bool = False, phantom: bool = False) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    if phantom:
        weight_map["model.phantom"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if lost:
        (folder / "model-00002-of-00002.safetensors").unlink()


MISTAKES: dict[str, tuple[Any, str]] = {
    "no such folder": (shutil.rmtree, r"init_from=.*/folder: there is no such file or folder; did you mean .*/folders\?"),
    "empty": (only, "holds no weights that can be read: neither model.safetensors nor .*; it has nothing"),
    "adapter": (lambda f: only(f, adapter_config__json="{}", adapter_model__safetensors=""), "is the folder of an adapter .*give the base"),
    "pickled": (lambda f: only(f, pytorch_model__bin="x"), "only pickled ones .pytorch_model.bin.: convert them"),
    "other name": (
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
        "but weights.safetensors: give the path of one file",
    ),
    "cut tensors": (lambda f: cut(f, 20_000), r"has 20,000 bytes and its header says [\d,]+: the copy or download is not finished"),
    "cut header": (lambda f: cut(f, 100), r"is no safetensors file, or is cut \(100 bytes\)"),
    "nothing left": (lambda f: cut(f, 0), r"is no safetensors file, or is cut \(0 bytes\)"),
    "pointer": (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"), "run git lfs pull"),
    "no JSON": (lambda f: (f / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notajson"), "its header cannot be read"),
    "file missing": (lambda f: in_two_files(f, lost=True), "names 2 files, and model-00002-of-00002.safetensors is missing"),
    "index lies": (lambda f: in_two_files(f, phantom=True), "lists model.phantom, which no file holds"),
    "index broken": (
        lambda f: only(f, model__safetensors__index__json='{"weight_map": 3}'),
        "model.safetensors.index.json is no index of safetensors",
    ),
    "quantized": (
        lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}'),
        "quantized with awq",
    ),
    "packed": (
        lambda f: edited(f, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)})),
        "lm_head.weight is torch.float32 here and torch.int8 there",
    ),
    "missing": (lambda f: edited(f, lambda t: t.pop("model.norm.weight")), "missing in the checkpoint: model.norm.weight"),
    "a name too many": (
        lambda f: edited(f, lambda t: t.update({"model.norm.bias": torch.zeros(3)})),
        r"unexpected in the checkpoint: model.norm.bias",
    ),
    "shape": (
        lambda f: edited(f, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(70, 32)})),
        r"other shape: model.embed_tokens.weight is \(64, 32\), the checkpoint has \(70, 32\)",
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "folder"
    torch.manual_seed(1)
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "folder"))


def on_meta(kind: str = "Llama", **options: Any) -> Causal:
    module = Causal(kind, **options)
    module.configure_model()
    return module


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_named(mistake: str, folder: Path) -> None:
    change, message = MISTAKES[mistake]
    (folder.parent / "folders").mkdir()
    change(folder)
    with pytest.raises(ValueError, match=message):
        open_pretrained(folder, on_meta(), "net")


def test_another_model_lists_the_names_and_a_wrong_kind_of_file_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing in the checkpoint: transformer.*\n.*unexpected in the checkpoint: model") as error:
        open_pretrained(folder, on_meta("GPT2"), "net")
    assert len(str(error.value).splitlines()) < 50 and "more" in str(error.value)
    torch.save({"weights": torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="is no Lightning checkpoint: it has no 'state_dict'"):
        open_pretrained(tmp_path / "x.pt", on_meta(), "net")
    with pytest.raises(ValueError, match=r"init_from\['nett'\]: Causal has no such module; it has net"):
        open_pretrained({"nett": folder}, on_meta(), "net")


def test_missing_experts_and_parts_of_two_models_are_named(tmp_path: Path) -> None:
    FAMILIES["Mixtral"]().save_pretrained(tmp_path)
    experts = "model.layers.0.block_sparse_moe.experts.3"
    edited(tmp_path, lambda tensors: [tensors.pop(f"{experts}.w{number}.weight") for number in (1, 2, 3)])
    with pytest.raises(ValueError, match=r"gate_up_proj is \(4, 96, 32\), the checkpoint has \(3, 96, 32\)"):
        open_pretrained(tmp_path, on_meta("Mixtral"), "net")
    edited(tmp_path, lambda tensors: tensors.update({f"{experts}.w1.weight": torch.zeros(48, 32)}))
    with pytest.raises(ValueError, match=r"become one tensor, and their shapes differ: tensors are missing"):
        open_pretrained(tmp_path, on_meta("Mixtral"), "net")


def test_what_transformers_ignores_is_ignored_here(folder: Path) -> None:
    """Old folders hold a rotary buffer for each layer."""
    edited(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert open_pretrained(folder, on_meta(), "net").views


# ---- ranks -------------------------------------------------------------------------------------------------------------------


def seen_by_one_rank(path: str) -> None:
    rank = dist.get_rank()
    os.path.exists = lambda _: rank == 0
    with pytest.raises(ValueError, match=r"1 of 2 ranks see it, and rank 1 not: every node needs it at this path"):
        open_pretrained(path, on_meta(), "net")


def other_files_on_another_rank(path: str) -> None:
    own = f"{path}-{dist.get_rank()}"
    pretrained.find_weights = lambda *_, **__: Path(own)
    with pytest.raises(ValueError, match="rank 1 sees other weights there than rank 0"):
        open_pretrained(path, on_meta(), "net")


def cut_while_reading(path: str) -> None:
    """The headers are whole on both ranks; then one rank's file ends too early."""
    module = on_meta()
    found = open_pretrained(path, module, "net")
    if dist.get_rank() == 1:
        (entry,) = [entry for entry in vars(found)["views"]["net.lm_head.weight"][1].tensors.values() if entry.name == "lm_head.weight"]
        copy = Path(f"{path}-cut.safetensors")
        copy.write_bytes(entry.file.read_bytes()[: entry.offset + 100])
        object.__setattr__(entry, "file", copy)
    found.reserve(module, torch.device("cpu"))
    with pytest.raises(ValueError, match="folder-cut.safetensors ends inside of lm_head.weight"):
        found.fill(module)


def test_what_one_rank_sees_is_raised_on_all(folder: Path) -> None:
    run_ranks(seen_by_one_rank, 2, str(folder))
    run_ranks(cut_while_reading, 2, str(folder))
    for rank in (0, 1):
        shutil.copytree(folder, f"{folder}-{rank}")
    edited(Path(f"{folder}-1"), lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].half()}))
    run_ranks(other_files_on_another_rank, 2, str(folder))


def downloads(folder: str, fails: bool, slow: float) -> tuple[int, str]:
    """Two nodes of two ranks; only the first rank of each may download."""
    rank, asked = dist.get_rank(), []

    def download(repository: str, revision: str | None) -> str:
        asked.append((repository, revision))
        time.sleep(slow if rank == 2 else 0)
        if fails and rank == 2:
            raise OSError("no route to host\nand much more")
        return f"{folder}/{rank // 2}"

    hub._download = download
    options: dict[str, Any] = dict(first_of_node=rank % 2 == 0, node=rank // 2, timeout=timedelta(seconds=2))
    try:
        place = str(hub.find_weights("org/name@v2", **options))
    except (ValueError, RuntimeError) as error:
        place = str(error)
    assert asked == ([("org/name", "v2")] if rank % 2 == 0 else [])
    return place


def test_one_download_for_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(downloads, 4, "place", False, 0.5) == ["place/0", "place/0", "place/1", "place/1"]


def test_a_failed_download_is_one_message_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages = run_ranks(downloads, 4, "place", True, 0)
    assert len(set(messages)) == 1 and "rank 2" in messages[0]
    assert (
        "there is no folder org/name@v2 here, and the hub's repository org/name could not be downloaded (no route to host)" in messages[0]
    )
    assert "much more" not in messages[0]


def test_who_does_not_come_back_from_a_download_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankFailure, match="the process group is of no more use"):
        run_ranks(late, 4, "place")
    said = Path("said").read_text()
    assert said.startswith(
        "init_from=org/name@v2: rank 0 waited 0:00:02 for the ranks that download for their nodes, and some did not come"
    )
    assert "Ranks 2 failed" in said


def late(folder: str) -> None:
    said = downloads(folder, False, 6.0)
    if dist.get_rank() == 0:
        Path("said").write_text(said)
    raise RuntimeError("the process group is of no more use")


def test_without_a_network_the_hub_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RuntimeError, match="there is no folder org/name here, and the hub's repository org/name could not be downloaded"):
        open_pretrained("org/name", on_meta(), "net")


# ---- in a run ----------------------------------------------------------------------------------------------------------------


def eager_and_unseeded(folder: str) -> dict[str, Tensor]:
    """Each rank built other values; nothing of what the folder brings is sent from rank 0."""
    torch.manual_seed(dist.get_rank())
    module = Causal(beside=True)
    module.net, module.probe = llama(), nn.Linear(32, 1)
    sent: list[int] = []
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, *rest, **options: (sent.append(tensor.numel()), broadcast(tensor, *rest, **options))
    trainer_of(folder).fit(module, loader())
    assert max(sent) < 100, sent  # the probe, and words of Lightning's
    return {name: full(tensor) for name, tensor in module.state_dict().items()}


def test_an_eager_module_gets_them_from_the_folder_and_the_rest_from_rank_0(folder: Path) -> None:
    one, two = run_ranks(eager_and_unseeded, 2, str(folder))
    assert worst(one, two)[0] == 0
    assert torch.equal(one["net.lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])


def beside_and_bfloat16(folder: str) -> dict[str, Tensor]:
    module = Causal(beside=True)
    module.configure_model()
    before = module.probe.weight.detach().clone()
    state = fitted(module.bfloat16(), folder)
    assert torch.equal(state["probe.weight"], before.bfloat16())
    return state


def test_the_prefix_is_found_the_rest_stays_and_dtypes_are_converted(folder: Path) -> None:
    """Two children: the LightningModule itself is parallelized, and the folder's names are those of its one transformers model."""
    expected = {f"net.{name}": tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for state in run_ranks(beside_and_bfloat16, 2, str(folder)):
        kept = {name: tensor for name, tensor in state.items() if name.startswith("net.")}
        off, name = worst(expected, kept)
        assert off == 0 and all(tensor.dtype == torch.bfloat16 for tensor in kept.values()), name


def sharded_by_the_user(folder: str) -> dict[str, Tensor]:
    return fitted(Causal(shards_itself=True), folder)


def test_a_module_that_shards_itself_is_filled_too(folder: Path) -> None:
    expected = {f"net.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for state in run_ranks(sharded_by_the_user, 2, str(folder)):
        assert worst(expected, state)[0] == 0


class Bare(L.LightningModule):
    """A parameter that nothing can draw, and one that is not in the folder."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.scale = nn.Module()
            self.scale.weight = nn.Parameter(torch.empty(5, 3))
            self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def bare(file: str) -> dict[str, Tensor]:
    with pytest.raises(ValueError, match="module 'scale' .* lies on the meta device and has no reset_parameters"):
        fitted(Bare(), None)
    return fitted(Bare(), file, strict=False)


def test_what_the_folder_has_is_not_drawn(tmp_path: Path) -> None:
    save_file({"scale.weight": torch.arange(15.0).view(5, 3)}, tmp_path / "x.safetensors")
    one, two = run_ranks(bare, 2, str(tmp_path / "x.safetensors"))
    assert torch.equal(one["scale.weight"], torch.arange(15.0).view(5, 3)) and worst(one, two)[0] == 0
    assert 0 < float(one["net.weight"].abs().max()) < 0.6  # drawn by the linear itself


def headless(folder: str) -> dict[str, Tensor]:
    with pytest.raises(ValueError, match=r"missing in the checkpoint: lm_head.weight(.|\n)*strict_loading=False"):
        fitted(Causal(), folder)
    return fitted(Causal(), folder, strict=False)


def test_a_base_model_gives_what_it_has_and_the_rest_is_drawn(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = llama().model
    base.save_pretrained(tmp_path)
    one, two = run_ranks(headless, 2, str(tmp_path))
    assert worst(one, two)[0] == 0
    drawn = one.pop("net.lm_head.weight")
    assert 0.15 < float(drawn.std()) < 0.25  # initializer_range 0.2: as transformers draws it
    assert worst({f"net.model.{name}": tensor for name, tensor in base.state_dict().items()}, one)[0] == 0


class Towers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.text, self.image = llama(), FAMILIES["Siglip"]()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_towers(folder: str) -> dict[str, Tensor]:
    with pytest.raises(ValueError, match=r"Towers has 2 transformers models, text, image: say which .*init_from=\{'text': 'DIR'\}"):
        fitted(Towers(), f"{folder}/text")
    return fitted(Towers(), {"text": f"{folder}/text", "image": f"{folder}/image"})


def test_each_tower_from_its_own_folder(tmp_path: Path) -> None:
    torch.manual_seed(1)
    text, image = llama(), FAMILIES["Siglip"]()
    text.save_pretrained(tmp_path / "text")
    image.save_pretrained(tmp_path / "image")
    expected = {f"{key}.{name}": t for key, model in (("text", text), ("image", image)) for name, t in model.state_dict().items()}
    for state in run_ranks(two_towers, 2, str(tmp_path)):
        assert worst(expected, state)[0] == 0


def tied_differently(folder: str) -> None:
    config = llama().config
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    module = Causal()
    module.net = model
    with pytest.raises(
        ValueError, match=r"net.model.embed_tokens.weight and net.lm_head.weight are one tensor in the module, but differ in"
    ):
        fitted(module, folder)


def test_tied_weights_that_differ_in_the_folder_are_refused(folder: Path) -> None:
    run_ranks(tied_differently, 2, str(folder))
    edited(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    with pytest.raises(RankFailure, match="DID NOT RAISE"):
        run_ranks(tied_differently, 2, str(folder))


def own_runs(checkpoint: str, folder: str) -> None:
    """A run that starts from the folder, and its resume, for which the folder is not there any more."""
    module = Causal()
    L.seed_everything(3)
    trainer = trainer_of(folder, steps=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(checkpoint)
    dist.barrier()
    with pytest.raises(ValueError, match="there is no such file or folder"):
        fitted(Causal(), folder + "-gone")
    again = Causal()
    trainer = trainer_of(folder + "-gone", steps=1)
    trainer.fit(again, loader(), ckpt_path=checkpoint)
    assert trainer.global_step == 1
    expected = {name: full(tensor) for name, tensor in module.state_dict().items()}
    assert worst(expected, {name: full(tensor) for name, tensor in again.state_dict().items()})[0] == 0


def test_a_resume_does_not_look_for_it(folder: Path, tmp_path: Path) -> None:
    run_ranks(own_runs, 2, str(tmp_path / "x.ckpt"), str(folder))


def decoder_from(path: str, plan: dict[str, Any]) -> dict[str, Tensor]:
    module = MegascaleModule(CONFIG)
    state = fitted(module, path, **plan)
    assert not any(optimizer.state for optimizer in module.trainer.optimizers)
    return state


PLANS: dict[str, dict[str, Any]] = {"fsdp2": {}, "tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
SOURCES = ("folder", "file", "export", "safetensors file")
DEFAULT = [("folder", "fsdp2"), ("folder", "pp2"), ("file", "tp2"), ("export", "pp2"), ("safetensors file", "tp2")]
SLOW = [(source, plan) for source in SOURCES for plan in PLANS if (source, plan) not in DEFAULT]


@pytest.mark.parametrize(("source", "plan"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_checkpoints_and_exports_give_their_weights(source: str, plan: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    module = MegascaleModule(CONFIG)
    module.model = Decoder(CONFIG)
    optimizer = torch.optim.AdamW(module.parameters())
    module.model(torch.arange(8).view(1, 8)).sum().backward()
    optimizer.step()
    hyper_parameters = {"hyper_parameters": {"path": Path("x")}}  # a class that torch does not unpickle by default
    checkpoints.save(tmp_path / "x.ckpt", {"global_step": 3, **hyper_parameters}, module, [optimizer])
    path = tmp_path / "x.ckpt"
    if source != "folder":
        kind = "ckpt" if source == "file" else "safetensors"
        path = checkpoints.export(path, tmp_path / "out", kind, weights_only=False)[0]
        if source == "file":
            content = torch.load(path, weights_only=False)
            torch.save({"state_dict": content["state_dict"], "epoch": 1}, path)
        path = path.parent if source == "export" else path
    states = run_ranks(decoder_from, 2, str(path), PLANS[plan])
    whole = {name: tensor for state in states for name, tensor in state.items()}
    assert worst(module.state_dict(), whole)[0] == 0

"""ExpertBalanceMonitor against a plain forward of the whole batch on one device, whose routers' choices are counted one by one."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_megascale import ExpertBalanceMonitor, MegascaleStrategy
from lightning_megascale.callbacks.expert_heatmap import as_picture, draw_loads, publish
from lightning_megascale.callbacks.expert_routers import RoutedLayer, RouterWatch, labels_of
from lightning_megascale.callbacks.expert_rules import BalanceRules
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.moe import Router
from lightning_megascale.strategies import context_proof
from tests.harness import run_alone, run_ranks

ROWS, LENGTH, BATCHES, EXPERTS, TOP_K = 4, 16, 4, 4, 2
SHAPE: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, intermediate_size=24, max_position_embeddings=LENGTH, init_std=0.2
)
MIXTURE: dict[str, Any] = dict(num_experts=EXPERTS, num_experts_per_token=TOP_K, expert_intermediate_size=8, num_shared_experts=1)


def own_model(**changes: Any) -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderConfig(**{**SHAPE, **MIXTURE, **changes})).double()


def mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
    )
    config._experts_implementation = "eager"  # grouped products take no float64
    return MixtralForCausalLM(config).double()


def collapse(model: Decoder, experts: dict[int, list[int]]) -> Decoder:
    """Every token's router input points the same way, and the routers of these layers send that way to these experts."""
    with torch.no_grad():
        model.embed_tokens.weight[:, 0] = 30.0
        for layer, chosen in experts.items():
            weight = model.layers[layer].mlp.router.weight
            weight.zero_()
            for place, expert in enumerate(chosen):
                weight[expert, 0] = 50.0 - place
    return model


def batches(padded: float = 0.0) -> list[dict[str, torch.Tensor]]:
    """Whole batches; ``padded``: the part of each row, at its end, that is padding."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(BATCHES):
        ids = torch.randint(32, (ROWS, LENGTH), generator=generator)
        batch = {"input_ids": ids, "labels": torch.randint(32, (ROWS, LENGTH), generator=generator)}
        if padded:
            real = torch.arange(LENGTH).expand(ROWS, -1) < round(LENGTH * (1 - padded))
            batch |= {"attention_mask": real.long(), "labels": batch["labels"].masked_fill(~real, -100)}
        found.append(batch)
    return found


class Module(L.LightningModule):
    """Trains with a rate of 0, so every step routes by the first weights; validation sees other tokens."""

    def __init__(self, model: torch.nn.Module, padded: float, validates: bool) -> None:
        super().__init__()
        self.model, self.padded, self.validates = model, padded, validates

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        if isinstance(self.model, Decoder):
            loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"])
            if not getattr(self.trainer.strategy, "accepts_loss_sum", False):
                return loss_sum / num_tokens
            return {"loss_sum": loss_sum, "num_tokens": num_tokens}
        return self.model(
            input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), labels=batch["labels"], use_cache=False
        ).loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.model(torch.zeros_like(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)

    def train_dataloader(self) -> DataLoader:
        strategy: Any = self.trainer.strategy
        rank, size = (
            getattr(strategy, "data_parallel_rank", self.global_rank),
            getattr(strategy, "data_parallel_size", self.trainer.world_size),
        )
        share = ROWS // size
        rows = [{k: v[i] for k, v in b.items()} for b in batches(self.padded) for i in range(rank * share, (rank + 1) * share)]
        return DataLoader(rows, batch_size=share)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader() if self.validates else []


class Records(Logger):
    name, version = "records", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if found := {key: value for key, value in metrics.items() if key.startswith("moe/")}:
            self.rows.append((step or 0, found))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def fit(
    make: Callable[[], torch.nn.Module],
    plan: dict[str, Any] | str | None,
    monitor: dict[str, Any] | None = None,
    padded: float = 0.0,
    validates: bool = False,
    folder: str | None = None,
    load: bool = False,
    save: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """On every rank. ``plan``: of MegascaleStrategy; "ddp"; None: a Trainer as it is."""
    if isinstance(plan, dict) and "context_parallel_size" in plan:
        context_proof._enabled = False  # in a forked rank, so nothing to put back
    callback = ExpertBalanceMonitor(**{"every_n_steps": BATCHES, "heatmap_every_n_steps": None, **(monitor or {})})
    records, module = Records(), Module(make(), padded, validates)
    strategy: Any = "auto" if plan is None else DDPStrategy(process_group_backend="gloo")
    if isinstance(plan, dict):
        strategy = MegascaleStrategy(label_alignment="aligned" if isinstance(module.model, Decoder) else "shift", **plan)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=strategy,
        callbacks=[callback],
        logger=records,
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": BATCHES, "val_check_interval": 1, **arguments},
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=f"{folder}/saved" if load else None)
    if save:
        trainer.save_checkpoint(f"{folder}/saved")
    return {
        "layers": callback.layers,
        "latest": callback.latest,
        "rows": records.rows,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("moe/")},
        "told": [str(warning.message) for warning in told if "experts" in str(warning.message) or "counted no" in str(warning.message)],
    }


def expected(model: torch.nn.Module, padded: float = 0.0, top_k: int = TOP_K) -> dict[str, dict[str, Any]]:
    """By a forward of every whole batch, and loops over its tokens."""
    chosen: dict[str, list[Any]] = {}

    def note(name: str, router: Any, args: Any, output: Any) -> None:
        indices = output[1] if isinstance(router, Router) else output[2]
        logits = args[0].flatten(0, -2) @ router.weight.T
        chosen.setdefault("model." + name, []).extend(zip(indices.tolist(), logits.tolist()))

    for name, module in model.named_modules():
        if name.endswith(("router", "gate")):
            module.register_forward_hook(lambda router, args, output, name=name: note(name, router, args, output))
    with torch.no_grad():
        for batch in batches(padded):
            model(batch["input_ids"])
    counted = [True] * (BATCHES * ROWS * LENGTH)
    if padded:
        counted = [bool(x) for batch in batches(padded) for x in batch["attention_mask"].flatten()]
    found = {}
    for name, tokens in chosen.items():
        counts, p_sum, z, entropy, number = [0] * EXPERTS, [0.0] * EXPERTS, 0.0, 0.0, sum(counted)
        for (indices, logits), real in zip(tokens, counted, strict=True):
            if not real:
                continue
            for expert in indices:
                counts[expert] += 1
            total = sum(math.exp(x - max(logits)) for x in logits)
            p = [math.exp(x - max(logits)) / total for x in logits]
            p_sum = [a + b for a, b in zip(p_sum, p)]
            z += (math.log(total) + max(logits)) ** 2
            entropy -= sum(x * math.log(x) for x in p if x > 0)
        mean = number * top_k / EXPERTS
        load = [count / mean for count in counts]
        found[name] = {
            "load": load,
            "tokens": number,
            "max_violation": max(load) - 1,
            "min_violation": 1 - min(load),
            "dead_experts": counts.count(0),
            "load_cv": math.sqrt(sum((x - 1) ** 2 for x in load) / EXPERTS),
            "load_entropy": -sum(x / EXPERTS * math.log(x / EXPERTS) for x in load if x) / math.log(EXPERTS),
            "balance": EXPERTS * sum(c / (number * top_k) * p / number for c, p in zip(counts, p_sum)),
            "z": z / number,
            "dropped": 0.0,
            "router_entropy": entropy / number,
        }
    return found


def check(result: dict[str, Any], wanted: dict[str, dict[str, Any]], owners: int = 1) -> None:
    """What a rank reported is what the plain forward counted."""
    assert list(result["layers"]) == list(wanted)
    for name, values in wanted.items():
        found = dict(result["layers"][name])
        if owners > 1:
            parts = [sum(values["load"][i : i + EXPERTS // owners]) for i in range(0, EXPERTS, EXPERTS // owners)]
            assert found.pop("ep_max_over_mean") == pytest.approx(max(parts) / (sum(parts) / owners))
        assert found.keys() == values.keys()
        for key, value in values.items():
            assert found[key] == pytest.approx(value, rel=1e-10, abs=1e-10), (name, key)
    over = {"max_violation": max, "dead_experts": sum, "balance": lambda values: sum(values) / len(values)}
    for key, reduce in over.items():
        assert result["latest"][f"moe/{key}"] == pytest.approx(reduce([values[key] for values in wanted.values()]))
        assert result["metrics"][f"moe/{key}"] == pytest.approx(result["latest"][f"moe/{key}"])  # what other callbacks may read
        for name, values in wanted.items():
            number = next(part for part in name.split(".") if part.isdecimal())
            assert result["latest"][f"moe/layer_{number}/{key}"] == pytest.approx(values[key])
    if result["rows"]:
        assert result["rows"] == [(BATCHES - 1, result["latest"])]


# ---- values ----------------------------------------------------------------------------------------------------------------------------


def some_dense() -> Decoder:
    return own_model(num_dense_layers=2)


def test_a_plain_trainer() -> None:
    check(run_alone(fit, own_model, None), expected(own_model()))


PLANS = {
    "ep2": dict(expert_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "tp+sp": dict(tensor_parallel_size=2, sequence_parallel=True),
    "tp": dict(tensor_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_two_ranks(name: str) -> None:
    results = run_ranks(fit, 2, own_model, PLANS[name], timeout=100)
    wanted = expected(own_model())
    for result in results:
        check(result, wanted, owners=PLANS[name].get("expert_parallel_size", 1))


@pytest.mark.parametrize("name", ["ep2", "tp+sp", "pp2", "cp2"])
def test_padding_does_not_count(name: str) -> None:
    results = run_ranks(fit, 2, own_model, PLANS[name], None, 0.75, timeout=100)
    check(results[0], expected(own_model(), 0.75), owners=PLANS[name].get("expert_parallel_size", 1))


def test_a_stage_without_experts() -> None:
    wanted = expected(some_dense())
    assert list(wanted) == ["model.layers.2.mlp.router"]  # of three: the first stage has none
    for result in run_ranks(fit, 2, some_dense, PLANS["pp2"], timeout=100):
        check(result, wanted)


def test_ddp() -> None:
    for result in run_ranks(fit, 2, own_model, "ddp", timeout=100):
        check(result, expected(own_model()))


@pytest.mark.parametrize("plan", [{}, dict(activation_checkpointing="full")], ids=str)
def test_recomputation_and_validation_do_not_count(plan: dict[str, Any]) -> None:
    result = run_alone(fit, own_model, plan, None, 0.0, True, timeout=200)
    check(result, expected(own_model()))


@pytest.mark.slow
def test_hooks_in_compiled_blocks() -> None:
    check(run_alone(fit, mixtral, {"compile": {"backend": "aot_eager"}}, None, 0.75, timeout=280), expected(mixtral(), 0.75))


def test_accumulated_batches_are_one_interval() -> None:
    def whole(result: dict[str, Any]) -> dict[str, Any]:
        return {name: (values["load"], values["tokens"]) for name, values in result["layers"].items()}

    accumulated = run_alone(_accumulated)
    assert whole(accumulated) == whole({"layers": expected(own_model())})


def _accumulated() -> dict[str, Any]:
    return fit(own_model, None, {"every_n_steps": 2}, accumulate_grad_batches=2, max_steps=2)


@pytest.mark.parametrize("padded", [0.0, 0.75])
def test_mixtral_under_fsdp2(padded: float) -> None:
    for result in run_ranks(fit, 2, mixtral, {"activation_checkpointing": "full"}, None, padded, timeout=100):
        check(result, expected(mixtral(), padded))


@pytest.mark.parametrize("name", ["tp", "pp2", "ep2"])
def test_mixtral_on_other_axes(name: str) -> None:
    """Under tensor parallelism both ranks see the same tokens, which count once."""
    for result in run_ranks(fit, 2, mixtral, PLANS[name], None, 0.75, timeout=100):
        check(result, expected(mixtral(), 0.75), owners=PLANS[name].get("expert_parallel_size", 1))


def test_mixtral_under_a_plain_trainer_with_padding() -> None:
    check(run_alone(fit, mixtral, None, None, 0.75), expected(mixtral(), 0.75))


def four_collapsed() -> Decoder:
    """Each layer on an expert of its own: together they load all experts alike."""
    return collapse(own_model(num_layers=4, num_experts_per_token=1), {layer: [layer] for layer in range(4)})


def test_four_layers_that_collapsed_on_disjoint_experts_read_4() -> None:
    result = run_alone(fit, four_collapsed, None)
    assert result["latest"]["moe/balance"] == pytest.approx(4.0)
    assert result["latest"]["moe/max_violation"] == pytest.approx(3.0)
    assert result["latest"]["moe/dead_experts"] == 12
    assert result["latest"]["moe/load_entropy"] == pytest.approx(0.0)
    assert [values["load"].index(4.0) for values in result["layers"].values()] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_routers_of_transformers(kind: str) -> None:
    """Softmax and sigmoid with groups; a subclass is known by its base."""
    import transformers.models as models

    folder = {"Qwen3Moe": "qwen3_moe", "DeepseekV3": "deepseek_v3"}[kind]
    modeling = getattr(getattr(models, folder), f"modeling_{folder}")
    config = getattr(getattr(models, folder), f"{kind}Config")(
        hidden_size=8, num_experts=8, num_local_experts=8, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2
    )
    base = getattr(modeling, f"{kind}TopKRouter" if kind == "Qwen3Moe" else f"{kind}TopkRouter")
    torch.manual_seed(0)
    router = type("Subclass", (base,), {})(config)
    torch.nn.init.normal_(router.weight)
    watch = RouterWatch(torch.nn.ModuleDict({"gate": router}), {}, torch.device("cpu"))
    assert watch.layers == [RoutedLayer("gate", 8, 3)]
    hidden = torch.randn(50, 8)
    before = watch.snapshot()
    logits, _, indices = router(hidden)
    router.eval()(hidden)
    with torch.no_grad():
        router.train()(hidden)
    vector, _ = watch.since(before)
    scores = logits.softmax(-1) if kind == "Qwen3Moe" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    assert vector[:8].tolist() == torch.bincount(indices.flatten(), minlength=8).tolist()
    torch.testing.assert_close(vector[8:16], scores.detach().double().sum(0), rtol=1e-5, atol=1e-5)
    assert vector[-5] == 50 and vector[-1] == 1
    assert float(vector[-3]) == pytest.approx(float(logits.detach().logsumexp(-1).square().sum()), rel=1e-5)
    watch.close()
    router(hidden)
    assert torch.equal(watch.since(before)[0], vector)  # the hook is off


def test_all_listed_classes_return_what_is_read() -> None:
    """The source of each: what its forward returns, and that it has the attributes."""
    import transformers

    from lightning_megascale.callbacks.expert_routers import _SIGMOID, _SOFTMAX, SCORES

    models, seen = Path(transformers.__file__).parent / "models", set()
    for file in models.glob("*/modeling_*.py"):
        for part in file.read_text().split("\nclass ")[1:]:
            name = re.match(r"\w+", part)[0]  # type: ignore[index]
            if name not in SCORES:
                continue
            seen.add(name)
            body = part.split("\n\n\n")[0]
            forward = body.split("def forward(")[1].split("\n    def ")[0]
            returned = [line.split("return ")[1] for line in forward.splitlines() if line.strip().startswith("return ")][-1]
            assert re.match(r"router_logits, [\w.()]+, \w+$", returned), (name, returned)
            assert "self.top_k = " in body and "self.num_experts = " in body, name
            if name != "PhimoeTopKRouter":  # calls a function
                assert ("sigmoid" in body) == (SCORES[name] == "sigmoid"), name
    known = {re.sub("Top[Kk]Router$", "", name) for name in seen}
    assert {*_SOFTMAX.split(), *_SIGMOID.split()} <= known


def test_further_routers() -> None:
    class MyRouter(torch.nn.Module):
        num_experts, top_k = 3, 1

        def forward(self, logits: torch.Tensor) -> Any:
            best = logits.topk(1)
            return logits, best.values, best.indices

    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 5.0, 1.0], [3.0, 0.0, 0.0]])
    watch = RouterWatch(torch.nn.Sequential(MyRouter()), {"MyRouter": "sigmoid"}, torch.device("cpu"))
    watch_batch = torch.nn.Sequential(MyRouter())
    assert watch_batch[0](logits)[2].flatten().tolist() == [1, 1, 0]
    begin = watch.snapshot()
    watch._count(next(iter(watch._own.values()))(), "sigmoid", MyRouter()(logits))
    assert watch.since(begin)[0][:3].tolist() == [1, 2, 0]
    watch.batch_mask = torch.tensor([[True, False, True]])
    watch._count(next(iter(watch._own.values()))(), "sigmoid", MyRouter()(logits))
    assert watch.since(begin)[0][:3].tolist() == [2, 3, 0]
    watch.batch_mask = torch.ones(1, 4, dtype=torch.bool)  # the model saw a row without its last token
    watch._count(next(iter(watch._own.values()))(), "sigmoid", MyRouter()(logits))
    assert watch.since(begin)[0][:3].tolist() == [3, 5, 0]
    with pytest.raises(ValueError, match=r"num_experts=3 returned logits of shape \(3, 2\)"):
        watch._count(next(iter(watch._own.values()))(), "sigmoid", MyRouter()(logits[:, :2]))


def test_labels() -> None:
    assert labels_of(["m.layers.2.gate", "m.layers.10.gate"]) == ["layer_2", "layer_10"]
    assert labels_of(["m.0.layers.2.gate", "m.0.layers.3.gate"]) == ["layer_2", "layer_3"]
    assert labels_of(["enc.0.gate", "dec.0.gate"]) == ["enc.0.gate", "dec.0.gate"]


# ---- warnings and pictures ---------------------------------------------------------------------------------------------------------------


def one_collapsed() -> Decoder:
    return collapse(own_model(num_layers=5, num_dense_layers=1), {3: [1, 3]})


RULES = dict(every_n_steps=1, heatmap_every_n_steps=2, dead_for=2, violation_above=0.95, violation_for=3)
COLLAPSED = dict(pipeline_parallel_size=2, expert_parallel_size=2)


def _collapsed(folder: str) -> dict[str, Any]:
    return fit(one_collapsed, COLLAPSED, RULES, folder=folder)


def test_a_collapsed_layer_on_four_ranks(tmp_path: Path) -> None:
    """Two stages, the first with a dense layer, experts over two ranks each; one layer sends everything to experts 1 and 3."""
    results = run_ranks(_collapsed, 4, str(tmp_path), timeout=150)
    for result in results:
        assert result["layers"]["model.layers.3.mlp.router"]["load"] == [0, 2, 0, 2]
        assert result["latest"]["moe/layer_3/dead_experts"] == 2 and result["latest"]["moe/layer_3/max_violation"] == 1
        assert result["latest"] == results[0]["latest"]
        assert [label for label in result["latest"] if "max_violation" in label and "layer" in label] == [
            f"moe/layer_{number}/max_violation" for number in (1, 2, 3, 4)
        ]
    first = results[0]["told"]
    assert [result["told"] for result in results[1:]] == [[], [], []]
    assert len(first) == 2
    assert "Up to step 2 no token came to these experts for 2 intervals of 1 steps:" in first[0]
    assert "- layer 3 (model.layers.3.mlp.router): experts 0, 2 of 4" in first[0] and "balance_bias_rate" in first[0]
    assert "Up to step 3" in first[1] and "- layer 3 (model.layers.3.mlp.router): 1.00; the busiest: experts 1, 3" in first[1]
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["moe_load_step2.png", "moe_load_step4.png"]
    rows = _rows_of_colour(tmp_path / "moe_load_step4.png")
    assert rows["dark red"] and rows["dark blue"] and rows["dark red"] == rows["dark blue"]  # in one and the same band
    height = max(rows["dark red"]) - min(rows["dark red"]) + 1
    assert len(rows["dark red"]) > 0.8 * height


def _rows_of_colour(file: Path) -> dict[str, set[int]]:
    """Lines of pixels in which a heat map's cells have the colours of 0 and of 2 or more; the bar at the right is left out."""
    from matplotlib.image import imread

    pixels = torch.tensor(imread(file)[..., :3]) * 255
    pixels = pixels[:, : int(pixels.shape[1] * 0.75)]
    colours = {"dark red": (103, 0, 31), "dark blue": (5, 48, 97)}
    near = {name: ((pixels - torch.tensor(colour)).abs().amax(-1) < 6).sum(1) > 30 for name, colour in colours.items()}
    return {name: set(lines.nonzero().flatten().tolist()) for name, lines in near.items()}


def test_cells_have_the_colours_of_their_loads() -> None:
    from matplotlib import colormaps

    loads = [[1.0, 0.0, 2.0, 1.0], [0.5, 1.5, 1.0, 1.0], [math.nan] * 4, [4.0, 0.0]]
    figure = draw_loads(loads, ["layer_1", "layer_2", "layer_3", "layer_7"], "Load of experts up to step 5")
    pixels, axes = as_picture(figure), figure.axes[0]
    for row, load in enumerate(loads):
        for expert in range(4):
            value = load[expert] if expert < len(load) else math.nan
            x, y = axes.transData.transform((expert + 0.3, row + 0.3))  # beside the cross
            wanted = (184, 184, 184) if math.isnan(value) else [255 * c for c in colormaps["RdBu_r"](value / 2 if value < 2 else 1.0)[:3]]
            assert pixels[pixels.shape[0] - round(y), round(x)].tolist() == pytest.approx(wanted, abs=3), (row, expert)
    assert axes.get_xlabel() == "expert" and axes.get_ylabel() == "layer" and axes.get_title() == "Load of experts up to step 5"
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "2", "3", "7"]


def test_pictures_go_to_loggers(tmp_path: Path) -> None:
    class Wandb(WandbLogger):
        def __init__(self) -> None:
            self.images: list[Any] = []

        def log_image(self, key: str, images: list[Any], step: int | None = None, **_: Any) -> None:  # type: ignore[override]
            self.images.append((key, images[0].shape[-1], step))

    class Board(TensorBoardLogger):
        figures: list[Any] = []
        experiment = property(lambda self: self)  # type: ignore[assignment]

        def __init__(self) -> None:
            pass

        def add_figure(self, tag: str, figure: Any, global_step: int, close: bool) -> None:
            self.figures.append((tag, global_step, close))

    figure, wandb, board = draw_loads([[1.0, 1.0]], ["layer_0"], "title"), Wandb(), Board()
    assert publish(figure, [wandb, board], 7, tmp_path) is None
    assert wandb.images == [("moe/load", 3, 7)] and board.figures == [("moe/load", 7, False)]
    assert not list(tmp_path.iterdir())
    assert publish(figure, [Records()], 7, tmp_path / "new") == tmp_path / "new" / "moe_load_step7.png"


LAYER = RoutedLayer("m.layers.5.gate", 4, 1)


def _interval(rules: BalanceRules, *load: float, tokens: int = 100) -> str:
    values = {"load": list(load), "max_violation": max(load) - 1, "tokens": tokens}
    return "\n".join(rules.update(40, [LAYER], ["layer_5"], [values]))


def test_rules_speak_once_and_again_after_it_has_passed() -> None:
    rules = BalanceRules(dead_for=2, violation_above=None, violation_for=1, every_n_steps=20)
    assert _interval(rules, 0, 1, 1, 2) == ""
    assert "- layer 5 (m.layers.5.gate): expert 0 of 4" in _interval(rules, 0, 0, 2, 2)
    assert "expert 1 of 4" in _interval(rules, 0, 0, 2, 2)
    assert _interval(rules, 0, 0, 2, 2) == ""
    assert _interval(rules, 1, 0, 1, 2) == ""  # alive again
    assert _interval(rules, 0, 0, 2, 2) == ""
    assert "expert 0 of 4" in _interval(rules, 0, 0, 2, 2)


def test_few_tokens_say_nothing_of_dead_experts() -> None:
    rules = BalanceRules(dead_for=1, violation_above=None, violation_for=1, every_n_steps=20)
    assert _interval(rules, 0, 1, 1, 2, tokens=39) == ""
    assert "expert 0" in _interval(rules, 0, 1, 1, 2, tokens=40)


def test_the_rule_of_violation_and_its_state() -> None:
    rules = BalanceRules(dead_for=None, violation_above=0.5, violation_for=3, every_n_steps=20)
    assert [_interval(rules, 1, 1, 0.4, 1.6) for _ in range(2)] == ["", ""]
    other = BalanceRules(dead_for=None, violation_above=0.5, violation_for=3, every_n_steps=20)
    other.load_state_dict(rules.state_dict())
    for each in (rules, other):
        assert "above 0.5 for 3 intervals of 20 steps:\n- layer 5 (m.layers.5.gate): 0.60; the busiest: expert 3" in _interval(
            each, 1, 1, 0.4, 1.6
        )
    assert _interval(rules, math.nan, 0, 0, 0, tokens=0) == ""  # says nothing
    assert _interval(rules, 1, 1, 0.4, 1.6) == ""


# ---- resuming, refusals ------------------------------------------------------------------------------------------------------------------


def _half(folder: str, load: bool) -> dict[str, Any]:
    window = {"every_n_steps": 2 * BATCHES, "dead_for": None}
    steps = {"max_steps": 2 * BATCHES if load else BATCHES, "max_epochs": -1}
    return fit(own_model, {}, window, folder=folder, load=load, save=not load, **steps)


def test_windows_continue_after_a_resume_with_another_plan(tmp_path: Path) -> None:
    """Half of an interval on two ranks, the other half on one."""
    first = run_ranks(_half, 2, str(tmp_path), False, timeout=100)
    assert first[0]["layers"] == {} and first[0]["rows"] == []
    second = run_alone(_half, str(tmp_path), True, timeout=100)
    wanted = expected(own_model())
    assert list(second["layers"]) == list(wanted)
    for name, values in wanted.items():
        assert second["layers"][name]["tokens"] == 2 * values["tokens"]  # the same batches twice
        assert second["layers"][name]["load"] == pytest.approx(values["load"], abs=1e-12)
        assert second["layers"][name]["z"] == pytest.approx(values["z"])


def test_a_state_of_another_step_is_left() -> None:
    monitor = ExpertBalanceMonitor(every_n_steps=2)
    monitor._watch, monitor._step = RouterWatch(own_model(), {}, torch.device("cpu")), 5
    monitor._seen = monitor._watch.snapshot() - 1.0
    state = monitor.state_dict()
    assert state["step"] == 5 and state["window"][0][0] == 1.0
    monitor.load_state_dict(state)
    monitor._resume()
    assert monitor._window is not None and monitor._window[0] == 1.0
    monitor.load_state_dict({**state, "step": 4})
    monitor._resume()
    assert monitor._window is None


def test_nothing_counted_is_told() -> None:
    told = run_alone(_reentrant)["told"]
    assert len(told) == 1 and "counted no token in 1 steps" in told[0] and "use_reentrant" in told[0]


class Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mixtral()

    def forward(self, **inputs: Any) -> Any:
        with torch.no_grad():
            out = self.inner(**inputs)
        out.loss = sum(p.sum() * 0 for p in self.inner.parameters())
        return out


def _reentrant() -> dict[str, Any]:
    return fit(Frozen, None, {"every_n_steps": 1}, max_steps=2)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="no router in Module.*models.moe.Router.*MixtralTopKRouter.*routers=.*leave the callback out"):
        fit(lambda: own_model(num_experts=0, expert_intermediate_size=None, num_shared_experts=0), None)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"every_n_steps": 0}, "every_n_steps=0: a whole number, at least 1"),
        ({"every_n_steps": True}, "every_n_steps=True"),
        ({"every_n_steps": 30}, "heatmap_every_n_steps=1000: a multiple of every_n_steps=30.*say 600, or None"),
        ({"heatmap_every_n_steps": 0}, "heatmap_every_n_steps=0"),
        ({"dead_for": 0}, "dead_for=0.*or None"),
        ({"violation_for": None}, "violation_for=None: a whole number"),
        ({"violation_above": 0}, "violation_above=0: a positive number"),
        ({"violation_above": "2"}, "violation_above='2'"),
        ({"per_layer": "z"}, "per_layer='z': a list of figures.*max_violation, min_violation"),
        ({"per_layer": ["load"]}, r"per_layer=\['load'\]"),
        ({"per_layer": None}, "per_layer=None: a list of figures"),
        ({"routers": ["A"]}, r"routers=\['A'\]: a mapping of class names"),
        ({"routers": {"MyRouter": "tanh"}}, "routers={'MyRouter': 'tanh'}: class names with 'softmax' or 'sigmoid'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertBalanceMonitor(**arguments)

"""Where the YAML lives and which types it has: conf/ is Hydra's search path, every file of recipes/ an option of the group ``recipe``."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_megascale.plan import ParallelPlan

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel both folders lie inside the package; in a checkout or an editable install, beside it.
ROOT = _PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent
CONF, RECIPES = ROOT / "conf", ROOT / "recipes"


@dataclass
class RunConfig:
    name: str = "${recipe_name:}"
    dir: str = "runs/${run.name}"
    next: list[str] = field(default_factory=list)  # commands to try when it is finished


@dataclass
class BatchConfig:
    global_size: int = 32  # rows of one optimizer step over all ranks
    micro_size: int | None = None  # rows of one forward on one rank; None: as many as one step gives it
    sequence_length: int = 128  # tokens of one row


@dataclass
class LaunchConfig:
    ranks: Any = "auto"  # a number, or "auto": the GPUs of this machine, 2 without any
    max_restarts: int = 0
    start_method: str = "forkserver"  # or "spawn"
    shutdown_seconds: int = 60  # how long an interrupted rank may take to write its checkpoint


@dataclass
class TrainerConfig:
    """Lightning's Trainer arguments and defaults, without those that a run derives (``errors.MOVED``)."""

    accelerator: str = "auto"
    precision: Any = None
    fast_dev_run: Any = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: Any = None
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: Any = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    enable_autolog_hparams: bool = True
    model_registry: str | None = None


def _plan_schema() -> type:
    """ParallelPlan's fields and defaults; the two batch sizes live under ``batch``."""
    types = {"int": int, "bool": bool, "str": str}
    rows = [
        (row.name, types.get(str(row.type), Any), field(default=row.default))
        for row in dataclasses.fields(ParallelPlan)
        if row.name not in ("global_batch_size", "microbatch_size")
    ]
    return dataclasses.make_dataclass("PlanConfig", rows)  # type: ignore[arg-type]


PlanConfig = _plan_schema()


@dataclass
class TrainConfig:
    """One run. The untyped groups are calls (``_target_``) or a decoder's fields; ``prepare`` checks their keys."""

    run: RunConfig = field(default_factory=RunConfig)
    resume: str = "auto"  # auto, never, or a checkpoint's path
    seed: int = 0
    batch: BatchConfig = field(default_factory=BatchConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)  # type: ignore[valid-type]
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: Any = None
    optim: Any = None
    data: Any = None
    callbacks: Any = None
    logger: Any = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)


def recipe_files(folder: Path) -> dict[str, Path]:
    """Recipe name -> file, below ``folder``."""
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.yaml"))}


def register(config_dirs: tuple[str, ...] = ()) -> None:
    """Adds the schema and all recipes to Hydra.

    A recipe is merged into the whole config. Recipes of our own and, in a user's ``--config-dir``, the YAML files that lie
    directly in it or in its ``recipe`` folder, are registered here, so none of them needs a ``# @package`` header; folders named like
    a group (``model``, ``data``) hold further options of that group, which Hydra finds by itself.
    """
    OmegaConf.register_new_resolver("recipe_name", _recipe_name, replace=True)
    OmegaConf.register_new_resolver("folder_name", lambda overrides: overrides.replace("/", "_"), replace=True)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig, provider="lightning_megascale")
    files = recipe_files(RECIPES)
    for folder in map(Path, config_dirs):
        files |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    for name, file in files.items():
        group, _, name = f"recipe/{name}".rpartition("/")
        store.store(group=group, name=name, node=OmegaConf.load(file), package="_global_", provider=str(file))


def _recipe_name(*, _root_: Any) -> str:
    """The chosen recipe. A sweep asks before Hydra's own ``hydra:`` resolver can answer; a run, after the ``hydra`` node has gone."""
    choices = OmegaConf.select(_root_, "hydra.runtime.choices") or HydraConfig.get().runtime.choices
    return choices["recipe"]


def recipe_names() -> list[str]:
    """The names of all registered recipes."""
    repository = ConfigStore.instance().repo.get("recipe", {})

    def names(tree: dict[str, Any], prefix: str) -> list[str]:
        found = []
        for key, value in sorted(tree.items()):
            found += names(value, f"{prefix}{key}/") if isinstance(value, dict) else [prefix + key.removesuffix(".yaml")]
        return found

    return names(repository, "")

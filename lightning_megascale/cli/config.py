"""Where the YAML lives and which types it has: conf/ is Hydra's search path, every file of recipes/ an option of the group ``recipe``."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from lightning_megascale.plan import ParallelPlan

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel both folders lie inside the package; in a checkout or an editable install, beside it.
ROOT = _PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent
CONF, RECIPES = ROOT / "conf", ROOT / "recipes"
UNREADABLE: dict[str, str] = {}  # recipe -> what is wrong with its file; said when it is chosen
_SWEPT: set[str] = set()  # keys that the command line gives several values
_LONGEST_NAME = 100


@dataclass
class RunConfig:
    name: str = "${recipe_name:}"
    dir: str = "runs/${run.name}"
    next: list[str] = field(default_factory=list)  # commands to try when it is finished


@dataclass
class BatchConfig:
    global_size: int = 32  # rows of one optimizer step over all ranks
    micro_size: int | None = None  # rows of one forward on one rank; None: as many as one step gives it
    loader_size: int | None = None  # derived: rows of a loader's batch, all microbatches of a pipeline's step
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
    init_from: Any = None  # first weights: a Hugging Face folder or hub name, an export, a checkpoint; or {module name: one of these}
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
    cluster: Any = None  # where the run is meant to be: what plan=auto, megascale plan and dryrun plan for; null: these ranks, FSDP2
    plan_file: str | None = None  # a plan that megascale plan out=FILE wrote, in the place of the plan group


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
    OmegaConf.register_new_resolver("sweep_folder", _sweep_folder, replace=True)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig, provider="lightning_megascale")
    files = recipe_files(RECIPES)
    for folder in map(Path, config_dirs):
        files |= {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    for name, file in files.items():
        UNREADABLE.pop(name, None)
        try:
            node = OmegaConf.load(file)
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            UNREADABLE[name] = yaml_mistake(error, file)
            continue
        if not isinstance(node, DictConfig):
            UNREADABLE[name] = f"{file}: a recipe is a mapping of keys to values"
            continue
        group, _, name = f"recipe/{name}".rpartition("/")
        store.store(group=group, name=name, node=node, package="_global_", provider=str(file))


def yaml_mistake(error: Exception, file: Path | str | None = None) -> str:
    """What is wrong with a YAML file and where, in one line.

    Args:
        error: what the reader raised.
        file: its path; None: the one that the error names.
    """
    mark = getattr(error, "problem_mark", None)
    place = f"{file or getattr(mark, 'name', 'a config file')}" + (f", line {mark.line + 1}" if mark else "")
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return f"{place}: this is no YAML: {what}"


def note_swept(arguments: list[str]) -> None:
    """Remembers which keys of the command line have several values: they name the folders of a sweep."""
    _SWEPT.clear()
    parser = OverridesParser.create()
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument]) if "=" in argument and not argument.startswith("-") else (None,)
        except OverrideParseException:  # Hydra will say so
            continue
        if override is not None and override.is_sweep_override():
            _SWEPT.add(override.get_key_element())


def swept(node: Any) -> str:
    """The values that set one run of a sweep apart, such as ``optim.lr=0.1,seed=2``.

    Args:
        node: the ``hydra`` node of that run's config.
    """
    keys = _SWEPT | set(node.sweeper.params or {})
    overrides = list(node.overrides.task)
    return ",".join(sorted(text for text in overrides if text.partition("=")[0] in keys) or sorted(overrides))


def _sweep_folder(*, _root_: Any) -> str:
    """The folder of one run of a sweep: its values, cut and given a hash where they are too long for a name."""
    name = swept(_root_.hydra).replace("/", "_")
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name.encode()[: _LONGEST_NAME - 13].decode(errors='ignore')}-{digest}"


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

"""``megascale plan``: the best parallel plans of a recipe, a model or a config.json on a cluster, as a table, a picture and a plan file."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megascale.cli.arguments import check_output, number
from lightning_megascale.cli.errors import USER_ERROR_EXIT_CODE, UserError, explain, wants_traceback

USAGE = """megascale plan recipe=NAME or model=NAME or hf=FOLDER [cluster=NAME] [key=value ...]

  Searches all parallel plans of a cluster's GPUs and shows the best by seconds per useful step: step time
  over the share of time that failures, checkpoints and recovery leave.

  recipe=NAME              model, batch, precision and cluster of a recipe
  model=NAME               a decoder of the model group
  hf=FOLDER                the config.json of a Hugging Face model
  cluster=NAME             of conf/cluster, or a YAML file like those there (h100_1024)
  gpus=64 gpu=h100         cut the cluster, or put other GPUs into it
  batch.global_size=1024   rows of a step; batch.sequence_length=2048 tokens of a row
  source_length=512        tokens that the encoder of an encoder-decoder reads for a row
  batch.micro_size=1       rows of one forward; left out, the search chooses
  plan.KEY=VALUE           fixes a field of the plan, such as plan.tensor_parallel_size=8
  plan_file=FILE           shows this plan as it is written, beside the best
  top=10                   how many plans to show
  profile=FILE             constants that megascale plan profile measured, in the place of the stack's own
  fabric=FILE              nodes and switches of a real fabric (Slurm's topology.conf, ibnetdiscover, labels of topograph),
                           with the speeds of the cluster
  nccl=FILE                NCCL's topology file of a node: refused where the cluster's nodes are others
  hosts=FILE ranks=FILE    places the best plan: the hosts in rank order (Slurm), and the strategy's placement
  out=plan.yaml            writes the best plan; megascale train plan_file=plan.yaml runs it
  png=plan.png             draws its timeline, memory and placement
  --config-dir FOLDER      recipes and groups of your own

megascale plan rows=FILE.csv [out=FILE.csv]
  predicts measured runs and prints the errors
megascale plan profile [out=FILE.yaml]
  measures matrix products, memory and collectives of this machine, for cluster files and stacks

  Exit code: 0 a plan was found, 2 none can be or something was asked for wrongly."""

_OWN = (
    "hf",
    "gpus",
    "gpu",
    "top",
    "out",
    "png",
    "plan_file",
    "source_length",
    "profile",
    "nccl",
    "fabric",
    "hosts",
    "ranks",
    "rows",
    "cluster",
)
_DEFAULT_CLUSTER = "h100_1024"
_DEFAULT_TOKENS = 2**22


@dataclass(frozen=True)
class Request:
    """What was typed: own keys, overrides for Hydra, and folders of recipes."""

    own: dict[str, str]
    overrides: list[str]
    folders: tuple[str, ...]


def main() -> None:
    """The verb."""
    try:
        code = run(sys.argv[1:])
    except BrokenPipeError:
        raise
    except Exception as error:
        message = str(error) if isinstance(error, ValueError) else explain(error)
        if message is None or wants_traceback():
            raise
        print(f"megascale: {message}", file=sys.stderr, flush=True)
        code = USER_ERROR_EXIT_CODE
    if code:
        raise SystemExit(code)


def run(arguments: list[str]) -> int:
    """Answers one request and returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "profile":
        from lightning_megascale.cli.plan_profile import profile

        return profile(arguments[1:])
    request = parse(arguments)
    if "rows" in request.own:
        from lightning_megascale.cli.plan_rows import predict

        return predict(request.own, request.overrides)
    return _search(request)


def parse(arguments: list[str]) -> Request:
    """Splits the arguments.

    Raises:
        UserError: for what is no key=value, or a key given twice.
    """
    own: dict[str, str] = {}
    overrides: list[str] = []
    folders: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folders.append(value if equals else next(rest, ""))
            if not Path(folders[-1]).is_dir():
                raise UserError(f"--config-dir {folders[-1]}: there is no such folder")
        elif not equals or argument.startswith("-"):
            raise UserError(f"arguments are key=value; {argument!r} is none. megascale plan --help lists them")
        elif name not in _OWN:
            overrides.append(argument)
        elif name in own:
            raise UserError(f"{name} is given twice")
        else:
            own[name] = value
    return Request(own, overrides, tuple(folders))


def _search(request: Request) -> int:
    from lightning_megascale.cli.plan_table import show
    from lightning_megascale.cli.setting import fixed_columns, kept_fields
    from lightning_megascale.planning.nearest import explain_nothing
    from lightning_megascale.planning.plan_effects import not_modelled, stack_under
    from lightning_megascale.planning.search import search

    own = request.own
    _check_outputs(own)
    cfg = _compose(request)
    setting, assumed, whole = _setting(request, cfg)
    plan = cfg["plan"] if any(item.startswith(("plan=", "plan.")) for item in request.overrides) else {}
    fixed = fixed_columns(plan, request.overrides)
    if (micro := cfg["batch"]["micro_size"]) is not None and any(item.startswith("batch.micro_size=") for item in request.overrides):
        fixed["microbatch_size"] = micro
    top = number("top", own.get("top", "10"), int, 1)
    given = _given_plan(own, setting)
    setting = dataclasses.replace(setting, stack=stack_under(setting.stack, plan))
    result = search(setting, top=top, fixed=fixed, given=kept_fields(plan))
    show(result, assumed, given, not_modelled({key: value for key, value in plan.items() if key != "pipeline_split"}))
    if not result.best:
        raise UserError(explain_nothing(result, fixed, whole))
    if "out" in own:
        _write(result.plan(block="model.layers.{}" if "hf" in own else "layers.{}"), result.best[0], request)
    placed = None
    if {"fabric", "hosts", "ranks"} & set(own):
        from lightning_megascale.cli.plan_place import place_best

        placed = place_best(result.best[0], whole, own)
    if "png" in own:
        from lightning_megascale.cli.plan_png import draw

        draw(result.best[0], own["png"], placed)
        print(f"wrote {own['png']}")
    return 0


def _check_outputs(own: dict[str, str]) -> None:
    """Files that are to be written can be, and are several.

    Raises:
        UserError: naming the key.
    """
    named = {key: own[key] for key in ("out", "png", "hosts", "ranks") if key in own}
    for key, path in named.items():
        check_output(key, path)
        others = [other for other, place in named.items() if other != key and Path(place).resolve() == Path(path).resolve()]
        if others:
            raise UserError(f"{key}={path} and {others[0]}={path} are one file; give each its own")
    if "out" in own and Path(own["out"]).suffix not in (".yaml", ".yml"):
        raise UserError(f"out={own['out']}: must be a .yaml file, such as plan.yaml")
    if "png" in own and Path(own["png"]).suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"png={own['png']}: must be a .png file (.pdf and .svg are drawn too)")


def _given_plan(own: dict[str, str], setting: Any) -> Any:
    """The estimate of ``plan_file=``, or None."""
    if "plan_file" not in own:
        return None
    from lightning_megascale.planning.estimates import estimate
    from lightning_megascale.planning.plan_file import read_plan

    plan = read_plan(own["plan_file"])
    batch = setting.workload.global_batch_size
    if plan.global_batch_size not in (None, batch):
        raise UserError(f"plan_file={own['plan_file']}: its global_batch_size={plan.global_batch_size}, and batch.global_size={batch}")
    sizes = (plan.data_parallel_size, plan.data_parallel_shard_size)
    ranks = setting.cluster.num_gpus if "auto" in sizes else int(sizes[0]) * plan.model_parallel_size
    return estimate(setting.workload, setting.cluster, plan.resolve(ranks), stack=setting.stack)


def _compose(request: Request) -> dict[str, Any]:
    """The run's config, only what the planner reads."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from lightning_megascale.cli import config

    config.register(request.folders)
    named = [item for item in request.overrides if item.startswith(("recipe=", "model="))]
    if bool(named) == ("hf" in request.own):
        what = "both are given" if named else "none is given"
        raise UserError(f"what to plan: recipe=NAME, model=NAME or hf=FOLDER; {what}")
    paths = [f"hydra.searchpath=[{','.join(f'file://{Path(folder).resolve()}' for folder in request.folders)}]"] if request.folders else []
    cluster = request.own.get("cluster", "")
    chosen = [f"cluster={cluster}"] if cluster and not cluster.endswith((".yaml", ".yml")) else []
    with initialize_config_dir(config_dir=str(config.CONF), version_base="1.3"):
        cfg = compose(config_name="train", overrides=[*request.overrides, *chosen, *paths])
    keys = ("model", "plan", "batch", "cluster", "trainer")
    return {key: OmegaConf.to_container(cfg[key], resolve=True) if cfg[key] is not None else None for key in keys}


def _setting(request: Request, cfg: dict[str, Any]) -> tuple[Any, list[str], Any]:
    """The setting of a search, what was assumed for it, and the cluster before it was cut."""
    from lightning_megascale.cli.setting import cluster_of, model_shape, setting_of
    from lightning_megascale.planning.model_config import from_hf
    from lightning_megascale.topology.describe import load_cluster

    own, assumed = request.own, []
    name = next((item.partition("=")[2] for item in request.overrides if item.startswith(("model=", "recipe="))), "")
    shape = from_hf(own["hf"]) if "hf" in own else model_shape(cfg["model"], name)
    if own.get("cluster", "").endswith((".yaml", ".yml")):
        cluster = load_cluster(own["cluster"])
    elif cfg["cluster"] is not None:
        cluster = cluster_of(cfg["cluster"])
    else:
        cluster = load_cluster(_DEFAULT_CLUSTER)
        assumed.append(f"cluster={_DEFAULT_CLUSTER}")
    gpus = number("gpus", own["gpus"], int, 1) if "gpus" in own else None
    whole = cluster.cut(gpu=own.get("gpu"))
    if "fabric" in own:
        from lightning_megascale.topology.readers import read_fabric

        fabric = read_fabric(own["fabric"])
        whole = fabric.cluster(like=whole)
        if left_out := getattr(fabric, "left_out", ()):
            assumed.append(f"no GPU nodes: {', '.join(left_out[:6])}{', ...' if len(left_out) > 6 else ''}")
    if "nccl" in own:
        from lightning_megascale.topology.nccl import read_nccl_node

        if wrong := read_nccl_node(own["nccl"]).differences(whole):
            lines = "\n".join(f"  - {line}" for line in wrong)
            raise UserError(f"nccl={own['nccl']}: a node of cluster {whole.name!r} is another; correct the cluster's file:\n{lines}")
    cluster = whole.cut(gpus=gpus)
    from_recipe = any(item.startswith("recipe=") for item in request.overrides)
    given = {item.partition("=")[0] for item in request.overrides}
    length, batch = cfg["batch"]["sequence_length"], cfg["batch"]["global_size"]
    if not from_recipe and "batch.sequence_length" not in given:
        length = min(shape.longest or 4096, 4096)
        assumed.append(f"batch.sequence_length={length}")
    if not from_recipe and "batch.global_size" not in given:
        batch = max(1, _DEFAULT_TOKENS // length)
        assumed.append(f"batch.global_size={batch}")
    if not isinstance(length, int) or length < 1:
        raise UserError(f"batch.sequence_length={length}: must be a whole number of at least 1")
    precision = cfg["trainer"]["precision"]
    if precision is None and not from_recipe:
        precision = "bf16-mixed"
        assumed.append("trainer.precision=bf16-mixed")
    source = number("source_length", own["source_length"], int, 1) if "source_length" in own else None
    setting = setting_of(shape, cluster, sequence_length=length, global_batch_size=batch, precision=precision, source_length=source)
    if "hf" in own:  # their heads give whole logits, unless called with labels
        setting = dataclasses.replace(setting, stack=dataclasses.replace(setting.stack, whole_logits=True))
    if "profile" in own:
        from lightning_megascale.cli.plan_profile import with_profile

        setting = dataclasses.replace(setting, stack=with_profile(setting.stack, own["profile"], cluster.gpu.name))
    return setting, assumed, whole


def _write(plan: Any, best: Any, request: Request) -> None:
    from lightning_megascale.planning.plan_file import write_plan

    out = request.own["out"]
    comments = (
        f"megascale plan {' '.join([*request.overrides, *(f'{key}={value}' for key, value in request.own.items())])}",
        f"{best.step_seconds:.3g} s a step, {best.memory_bytes / 1e9:.1f} GB a GPU, goodput {best.goodput.share:.3f} on {best.gpus} GPUs",
        "the estimates of a model: see its errors in README",
    )
    write_plan(plan, out, comments)
    print(f"wrote {out}: run it with megascale train plan_file={out}")

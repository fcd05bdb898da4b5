"""Every recipe and option composes; the schema follows Lightning and ParallelPlan; mistakes are named; nothing imports torch too early."""

import dataclasses
import importlib.util
import inspect
import subprocess
import sys

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_megascale.cli import config, dryrun, launch, prepare, train, values
from lightning_megascale.cli.__main__ import VERBS
from lightning_megascale.cli.errors import MOVED, UserError
from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.plan import ParallelPlan
from tests.cli.run_megascale import environment, megascale


def composed(*overrides):
    config.register()
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        return compose("train", list(overrides))


def options_of(group):
    return sorted(file.stem for file in (config.CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("recipe", sorted(config.recipe_files(config.RECIPES)))
def test_every_recipe_composes_and_can_start(recipe):
    cfg = composed(f"recipe={recipe}", f"run.name={recipe}")
    ready = train.finish(cfg, 2 if cfg.plan.data_parallel_shard_size == "auto" else dryrun.number_of_ranks(cfg))
    prepare.check_model(ready.options["model"], ready.options["batch"]["sequence_length"])
    prepare.check_optim(ready.options["optim"])
    for section in ("data", "callbacks", "logger"):
        prepare.check_calls(section, ready.options[section])
    assert (
        ready.plan.global_batch_size
        == ready.options["batch"]["global_size"]
        == ready.options["data"]["batch_size"] * ready.plan.data_parallel_size
    )


@pytest.mark.parametrize("group", ["model", "plan", "data", "optim", "trainer", "callbacks", "logger", "launch", "cluster"])
def test_every_option_of_every_group_composes(group):
    given = {"data.sources": "{words: {urls: words.tar}}", "data.tokenizer": "tokenizer"}
    for option in options_of(group):
        missing = OmegaConf.missing_keys(composed(f"{group}={option}", "run.name=x"))
        assert missing <= given.keys(), option  # an option that asks for more has to be said here and in its file
        cfg = composed(f"{group}={option}", "run.name=x", *(f"{key}={given[key]}" for key in sorted(missing)))
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def test_models_are_the_presets():
    for name, preset in PRESETS.items():
        values = yaml.safe_load((config.CONF / "model" / f"{name}.yaml").read_text())
        assert list(values) == [field.name for field in dataclasses.fields(DecoderConfig)]
        assert DecoderConfig.from_dict({**values, "norm_eps": float(values["norm_eps"])}) == preset
    assert set(options_of("model")) == {*PRESETS, "quickstart"}


def test_trainer_schema_is_lightnings_signature():
    from lightning.pytorch import Trainer

    arguments = inspect.signature(Trainer.__init__).parameters
    derived = {key.partition(".")[2] for key in MOVED if key.startswith("trainer.")}
    ours = {field.name: field.default for field in dataclasses.fields(config.TrainerConfig)}
    lightnings = {name: value.default for name, value in arguments.items() if name not in derived and name != "self"}
    assert ours == lightnings


def test_plan_schema_is_the_parallel_plan():
    ours = {field.name: field.default for field in dataclasses.fields(config.PlanConfig)}
    plans = {field.name: field.default for field in dataclasses.fields(ParallelPlan)}
    assert plans.items() - ours.items() == {("global_batch_size", None), ("microbatch_size", None)}
    assert not ours.items() - plans.items()


def fails(capsys, monkeypatch, tmp_path, *arguments):
    """Exit code and message of ``megascale train`` in this process, which gets no further than its checks."""

    def started(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "warm_up", lambda *_: None)
    monkeypatch.setattr(launch, "launch", started)
    installed = {"wandb": importlib.util, "tensorboard": None, "tensorboardX": None}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: installed[name] if name in installed else find(name, *more))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["megascale", *arguments])
    with pytest.raises(SystemExit) as stop:
        train.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe=quikstart", "there is no recipe 'quikstart'; did you mean 'quickstart'?"),
        ("model=smal", "there is no model 'smal'; did you mean 'small'?"),
        ("model.num_layer=3", "there is no key 'model.num_layer'; did you mean 'model.num_layers'?"),
        ("+model.nlayers=3", "decoder config has no key 'nlayers'; did you mean 'num_layers'?"),
        ("model.num_heads=7", "num_heads=7: must divide hidden_size=192"),
        ("model.num_layers=three", "model.num_layers=three: must be a whole number"),
        ("plan.tensorparallel=2", "there is no key 'plan.tensorparallel'; did you mean 'plan.tensor_parallel_size'?"),
        ("plan.tensor_parallel_size=two", "plan.tensor_parallel_size: Value 'two' of type 'str' could not be converted to Integer"),
        ("plan.tensor_parallel_size=3", "does not divide the 2 ranks: use a multiple of 3 ranks; nearest tensor_parallel_size: 2"),
        ("plan.global_batch_size=8", "plan.global_batch_size is no key of a run: the global batch is batch.global_size"),
        ("trainer.max_step=3", "there is no key 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
        ("trainer.strategy=ddp", "trainer.strategy is no key of a run: the strategy is MegascaleStrategy"),
        ("trainer.accumulate_grad_batches=2", "accumulation is derived from batch.global_size"),
        ("lr=1e-3", "there is no key 'lr'; did you mean 'optim.lr'?"),
        ("reciep=quickstart", "there is no key 'reciep'; did you mean 'recipe'?"),
        ("quickstart", "arguments are key=value: write recipe=quickstart"),
        ("optim.betas=[0.9", "cannot read 'optim.betas=[0.9'"),
        ("+optim.weight_deca=0", "optimizer has no argument 'weight_deca'; did you mean 'weight_decay'?"),
        ("optim.schedule.kind=cosin", "schedule kind='cosin': must be one of constant, cosine, wsd"),
        ("batch.global_size=17", "batch.global_size=17 is no multiple of the data-parallel size 2: nearest 16 or 18"),
        ("batch.micro_size=3", "nearest batch.global_size 12 or 18, or batch.micro_size=2 or 4"),
        ("batch.micro_size=0", "batch.micro_size=0: must be at least 1"),
        ("batch.sequence_length=4096", "batch.sequence_length=4096 is more than model.max_position_embeddings=1024"),
        ("+data.foo=3", "TextDataModule takes no argument 'foo'"),
        ("data._target_=lightning_megascale.data.datamodule.TextDatModule", "data._target_="),
        ("+callbacks.x._target_=no_such_module.X", "callbacks.x._target_=no_such_module.X"),
        ("launch.ranks=0", "launch.ranks=0: must be auto or a whole number of at least 1"),
        ("resume=runs/none.ckpt", "resume=runs/none.ckpt: there is no such checkpoint"),
        ("--config-dir=nowhere", "--config-dir nowhere: there is no such folder"),
        ("~callbacks.smple", "'callbacks.smple' does not exist"),
        ("optim.lr=abc", "optim.lr='abc': must be a finite number of at least 0"),
        ("optim.lr=null", "optim.lr=None: must be a finite number of at least 0"),
        ("optim.betas=0.9", "optim.betas=0.9: must be two numbers in [0, 1), such as [0.9, 0.95]"),
        ("optim.schedule.warmup_steps=abc", "optim.schedule.warmup_steps='abc': must be an integer of at least 0"),
        ("optim.schedule.min_ratio=abc", "optim.schedule.min_ratio='abc': must be in [0, 1]"),
        ("trainer.max_steps=4", "trainer.max_steps=4 must exceed optim.schedule.warmup_steps=20: add optim.schedule.warmup_steps=1"),
        (
            "trainer.fast_dev_run=true",
            "trainer.fast_dev_run=true must exceed optim.schedule.warmup_steps=20: add",
        ),
        ("optim=adamw_wsd", "trainer.max_steps=200 must be at least optim.schedule.warmup_steps=20 + optim.schedule.decay_steps=200: add"),
        ("seed=-1", "seed=-1: must be a whole number of at least 0 and below 2**32"),
        ("launch.start_method=forks", "launch.start_method=forks: must be forkserver or spawn; did you mean 'forkserver'?"),
        ("launch.max_restarts=-1", "launch.max_restarts=-1: must be at least 0"),
        (
            "run.dir=/proc/foo",
            "cannot make or write the run's folder: No such file or directory: /proc/foo; choose another",
        ),
        ("run.dir=/proc/version/x", "run.dir: cannot make or write the run's folder: Not a directory: /proc/version/x; choose another"),
        ("data.cache_dir=/proc/version", "data: cache_dir='/proc/version' cannot be written"),
        ("data.cache_dir=/proc/foo", "data: cache_dir='/proc/foo' cannot be written"),
        ("model.dropout=abc", "model.dropout=abc: must be a number"),
        ("data.num_workers=abc", "data.num_workers=abc: must be a whole number"),
        ("data.validation_fraction=abc", "data.validation_fraction=abc: must be a number"),
        ("data.validation_fraction=2", "data.validation_fraction=2: above 0 and below 1"),
        (
            "model._target_=mymod.M",
            "its arguments to FOLDER/model/NAME.yaml and say model=NAME --config-dir FOLDER",
        ),
        ("+model._target_=torch.nn.Linear", "torch.nn.Linear takes no argument 'vocab_size'\nA model of your own is a file: write"),
        ("plan.tensor_parallel_size=8", "launch.ranks=8"),
        ("resume=atuo", "resume=atuo: there is no such checkpoint; did you mean 'auto'?"),
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1.0: must be at least 0"),
        ("trainer.max_steps=0", "trainer.max_steps=0: must be at least 1, or -1 for no limit"),
        ("batch.sequence_length=0", "batch.sequence_length=0: must be at least 2"),
        ("logger=tensorboard", "logger=tensorboard needs the package tensorboard: pip install tensorboard, or say logger=csv"),
        (
            "logger=wandb",
            "run wandb login once (or set WANDB_API_KEY), log on this machine only with WANDB_MODE=offline, or",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_starts(capsys, monkeypatch, tmp_path, override, message):
    code, text = fails(capsys, monkeypatch, tmp_path, *([] if override.startswith("launch.") else ["launch.ranks=2"]), override)
    assert code == 2
    assert message in text
    assert text.startswith("megascale: ")
    assert "Traceback" not in text and "Error executing" not in text


def test_ways_to_use_weights_and_biases(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.util)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    logger = {"_target_": "lightning.pytorch.loggers.WandbLogger", "offline": False}
    with pytest.raises(UserError):
        values.check_logger(logger)
    values.check_logger({**logger, "offline": True})
    for name, value in (("WANDB_API_KEY", "x"), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            values.check_logger(logger)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    values.check_logger(logger)


def test_a_broken_file_is_named_only_when_it_is_chosen(capsys, monkeypatch, tmp_path):
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    (own / "good.yaml").write_text("optim:\n  lr: 0.5\n")
    (own / "broken.yaml").write_text("optim:\n  lr: [0.5\nseed: 1\n")
    (own / "rows.yaml").write_text("- 1\n")
    (own / "model" / "bad.yaml").write_text("a: 1\n  b: 2\n")
    for arguments, message in (
        (("recipe=good", "seed=-1"), "seed=-1: must be"),  # it composes
        (("recipe=broken",), "recipe=broken: own/broken.yaml, line 3: this is no YAML"),
        (("recipe=rows",), "own/rows.yaml: a recipe is a mapping of keys to values"),
        (("model=bad",), "own/model/bad.yaml, line 2: this is no YAML"),
    ):
        code, text = fails(capsys, monkeypatch, tmp_path, *arguments, "--config-dir", "own")
        assert code == 2 and message in text and "Traceback" not in text


def test_a_sweeps_folders_are_named_by_what_differs(monkeypatch):
    config.register()
    config.note_swept(["--multirun", "optim.lr=1,2", "model.num_layers=4", "seed=range(3)", "x=[", "plan=tp2"])
    task = ["model.num_layers=4", "seed=1", "optim.lr=1", "plan=tp2"]

    def folder(**changes):
        node = {"sweeper": {"params": None}, "overrides": {"task": task}, **changes}
        return OmegaConf.create({"hydra": node, "name": "${sweep_folder:}"}).name

    assert folder() == "optim.lr=1,seed=1"
    assert folder(sweeper={"params": {"plan": "tp1,tp2"}}) == "optim.lr=1,plan=tp2,seed=1"
    names = [folder(overrides={"task": [f"optim.lr={'9' * 300}{end}"]}) for end in "12"]
    assert names[0] != names[1] and {len(name) for name in names} == {100}


def test_only_the_first_rank_speaks(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, spoke in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        code, text = fails(capsys, monkeypatch, tmp_path, "recipe=nope")
        assert code == 2 and bool(text) == spoke


def test_a_sweep_inside_a_launcher_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code, text = fails(capsys, monkeypatch, tmp_path, "--multirun", "optim.lr=1,2")
    assert code == 2 and "run megascale train itself, not inside a launcher" in text


def test_full_errors_on_request(tmp_path):
    done = megascale("train", "recipe=nope", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 2 and "Traceback" in done.stderr and "MissingConfigException" in done.stderr


def test_recipes_and_options_of_a_user(tmp_path):
    own = tmp_path / "own"
    (own / "model").mkdir(parents=True)
    small = (config.CONF / "model" / "tiny.yaml").read_text().replace("num_layers: 2", "num_layers: 5")
    (own / "model" / "five.yaml").write_text(small)
    (own / "mine.yaml").write_text("# Mine.\ndefaults:\n  - override /model: five\noptim:\n  lr: 0.5\n")
    done = megascale("train", "recipe=mine", "--config-dir", "own", "optim.eps=1", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cfg = yaml.safe_load(done.stdout)
    assert (cfg["model"]["num_layers"], cfg["optim"]["lr"], cfg["optim"]["eps"]) == (5, 0.5, 1)
    (own / "mine.yaml").write_text("optim:\n  lrr: 0.5\ntrainer:\n  max_stepz: 3\n")
    done = megascale("train", "recipe=mine", "--config-dir", "own", cwd=tmp_path)
    assert done.returncode == 2 and "recipe/mine: there is no key 'trainer.max_stepz'; did you mean 'trainer.max_steps'?" in done.stderr


def test_without_torch(tmp_path):
    """What only reads answers without the seconds that torch takes."""
    for arguments in (["recipes"], ["train", "--cfg", "job"], ["train", "--help"], []):
        code = (
            "import sys; from lightning_megascale.cli.__main__ import main\n"
            "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
            "assert 'torch' not in sys.modules, 'torch was imported'"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_verbs(capsys, monkeypatch):
    from importlib import import_module

    from lightning_megascale.cli import __main__

    for verb in VERBS:
        assert callable(import_module(f"lightning_megascale.cli.{verb}").main)
    monkeypatch.setattr(sys, "argv", ["megascale"])
    __main__.main()
    listed = capsys.readouterr().out
    assert all(f"\n  {verb} " in listed for verb in VERBS)
    for given, message in (
        ("trian", "'trian' is no verb; did you mean 'train'?"),
        ("recipe=x", "a verb comes first: megascale train recipe=x"),
    ):
        monkeypatch.setattr(sys, "argv", ["megascale", given])
        with pytest.raises(SystemExit) as stop:
            __main__.main()
        assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("megascale tr", ["train"]),
        ("megascale train recipe=", ["recipe=quickstart"]),
        ("megascale train plan.tensor_p", ["plan.tensor_parallel_size="]),
        ("megascale train model=dense", ["model=dense_175b"]),
    ],
)
def test_tab_completion(tmp_path, line, answers):
    done = megascale("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert set(answers) <= set(done.stdout.split()), done.stdout + done.stderr


# ---- plans that the planner makes ---------------------------------------------------------------------------------------------


def ready(capsys, monkeypatch, tmp_path, *arguments):
    """What ``megascale train`` would start its ranks with."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "start_ranks", lambda ready, ranks: found.append((ready, ranks)))
    monkeypatch.setattr(train.launch, "warm_up", lambda *_: None)
    monkeypatch.setattr(train.sys, "argv", ["megascale", *arguments])
    train.main()
    capsys.readouterr()
    return found[0]


def test_a_plan_file_takes_the_place_of_the_plan_group_and_says_the_microbatch(capsys, monkeypatch, tmp_path):
    (tmp_path / "plan.yaml").write_text("pipeline_parallel_size: 2\nmicrobatch_size: 4\nglobal_batch_size: 16\n")
    given, ranks = ready(capsys, monkeypatch, tmp_path, "plan_file=plan.yaml", "launch.ranks=2")
    plan = given.plan
    assert (ranks, plan.pipeline_parallel_size, plan.microbatch_size, plan.global_batch_size) == (2, 2, 4, 16)
    assert given.options["batch"]["loader_size"] == 16
    code, text = fails(capsys, monkeypatch, tmp_path, "plan_file=plan.yaml", "batch.global_size=32")
    assert code == 2 and "its global_batch_size is 16, and batch.global_size=32: say batch.global_size=16" in text
    code, text = fails(capsys, monkeypatch, tmp_path, "plan_file=other.yaml")
    assert code == 2 and "plan_file=other.yaml: No such file" in text


def test_plan_auto_searches_where_the_cluster_is_known(capsys, monkeypatch, tmp_path):
    wanted = ("model=7b", "batch.global_size=64", "batch.sequence_length=2048", "trainer.precision=bf16-mixed", "launch.ranks=16")
    plain, _ = ready(capsys, monkeypatch, tmp_path, *wanted, "run.name=a")
    assert plain.plan.data_parallel_shard_size == 16 and plain.plan.activation_checkpointing is None  # FSDP2 over all ranks
    found, ranks = ready(capsys, monkeypatch, tmp_path, *wanted, "run.name=b", "cluster=h100_1024", "plan.tensor_parallel_size=4")
    assert ranks == 16 and found.plan.tensor_parallel_size == 4 and found.plan.sequence_parallel
    assert found.plan.data_parallel_size == 4 and not found.plan.check(16)
    code, text = fails(capsys, monkeypatch, tmp_path, *wanted, "cluster=local")
    assert code == 2 and "plan=auto: 16 ranks, and cluster 'local' has 8 GPUs" in text


def test_a_recipe_for_many_ranks_says_how_many(capsys, monkeypatch, tmp_path):
    code, text = fails(capsys, monkeypatch, tmp_path, "recipe=dense_175b", "launch.ranks=2")
    assert code == 2 and text.rstrip().endswith("Start as many ranks as it needs: launch.ranks=1024")

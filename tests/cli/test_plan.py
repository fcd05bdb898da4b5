"""``megascale plan``: what it prints and writes, what it refuses, that torch stays out of it, and that train runs what it wrote."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lightning_megascale.cli import plan as verb
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.planning.plan_file import read_plan

SMALL = ("model=7b", "cluster=h100_1024", "gpus=16", "batch.global_size=64", "batch.sequence_length=2048")


def said(capsys, *arguments):
    """(exit code, what was printed on either stream)."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    try:
        sys.argv = ["megascale", *arguments]
        verb.main()
        code = 0
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out + err


@pytest.fixture(autouse=True)
def _argv(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["megascale"])
    monkeypatch.chdir(tmp_path)


def test_the_table_shows_the_best_plans_and_what_ruled_out_the_others(capsys):
    code, text = said(capsys, *SMALL, "top=4")
    assert code == 0 and text.count("dp_") >= 4
    for word in (
        "7b, 6.74 G parameters, 32 blocks", "64 rows of 2,048 tokens", "h100_1024: 16 h100", "assumed  trainer.precision=bf16-mixed",
        "s/useful", "goodput", "MFU: nothing recomputed, attention's causal half", "what ruled the others out:",
    ):  # fmt: skip
        assert word in text


def test_the_plan_file_holds_the_first_row_and_its_batch(capsys):
    code, text = said(capsys, *SMALL, "top=1", "out=best.yaml", "plan.tensor_parallel_size=4", "batch.micro_size=2")
    assert code == 0 and "run it with megascale train plan_file=best.yaml" in text
    plan = read_plan("best.yaml")
    assert (plan.tensor_parallel_size, plan.microbatch_size, plan.global_batch_size, plan.sequence_parallel) == (4, 2, 64, True)
    assert not plan.check(16) and "tp4" in text
    assert Path("best.yaml").read_text().startswith("# megascale plan model=7b")


def test_a_default_that_is_typed_is_held_to(capsys):
    code, text = said(capsys, *SMALL, "top=3", "plan.tensor_parallel_size=1", "plan.pipeline_parallel_size=2")
    rows = [line for line in text.splitlines() if "pp2" in line and "dp_" in line]
    assert code == 0 and len(rows) == 3 and not any(" tp" in row for row in rows)


def test_the_picture_is_drawn(capsys):
    code, _ = said(capsys, *SMALL, "top=1", "png=plan.png", "plan.pipeline_parallel_size=2")
    image = Image.open("plan.png").convert("RGB")
    assert code == 0 and image.width > 1000 and len(image.getcolors(10**7)) > 50


def test_a_plan_file_is_shown_as_it_is_written_beside_the_best(capsys):
    values = {"data_parallel_size": 64, "data_parallel_shard_size": 64, "tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    values |= {"microbatch_size": 4, "global_batch_size": 1024}
    Path("seed.yaml").write_text(yaml.safe_dump(values))
    code, text = said(capsys, "recipe=dense_175b", "cluster=h100_1024", "plan_file=seed.yaml", "top=2")
    assert code == 0 and "the plan as written" in text and "does not fit: a GPU has 84.9 GB" in text
    assert "the plan as written cannot run" in text and "needs 180.1 GB" in text
    assert "unsharded 66.2, activations 106.8" in text  # 175e9 / 16 x (2 + 4) bytes, and what README says
    Path("seed.yaml").write_text(yaml.safe_dump(values | {"activation_checkpointing": "full", "sequence_parallel": True}))
    code, text = said(capsys, "recipe=dense_175b", "cluster=h100_1024", "plan_file=seed.yaml", "top=2")
    share = float(text.partition("the best plan needs ")[2].partition(" ")[0])
    assert code == 0 and "needs 75.5 GB" in text and "and fits" in text and share == pytest.approx(0.53, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), None),
        (("model=7b", "hf=x"), "recipe=NAME, model=NAME or hf=FOLDER; both are given"),
        (("gpus=8",), "none is given"),
        (("seven",), "'seven' is none"),
        (("model=7c",), "there is no model '7c'; did you mean '7b'?"),
        (("model=7b", "cluster=h100"), "there is no cluster 'h100'; did you mean 'h100_1024'?"),
        (("model=7b", "gpu=h1000"), "did you mean 'h100'?"),
        (("model=7b", "gpus=12"), "take 8 or 16"),
        (("model=7b", "gpus=8", "gpus=16"), "gpus is given twice"),
        (("model=7b", "top=none"), "top=none: must be a whole number"),
        (("model=7b", "trainer.precision=int8"), "precision='int8': the planner knows bf16-mixed"),
        (("model=7b", "out=plan.txt"), "out=plan.txt: must be a .yaml file"),
        (("model=7b", "gpus=8", "plan.pipeline_split=[layers.4]"), "plan.pipeline_split=['layers.4']: a search cannot hold to it"),
        (("model=7b", "rows=x.csv"), "takes model, GPUs and plan from the file"),
        (("rows=x.csv",), "rows=x.csv: there is no such file"),
        (("hf=nowhere",), "hf=nowhere: there is no nowhere"),
        (("model=7b", "profile=nowhere.yaml"), "profile=nowhere.yaml: cannot be read"),
        (("model=7b", "plan_file=nowhere.yaml"), "plan_file=nowhere.yaml: No such file"),
        (("model=7b", "gpus=8", "plan.tensor_parallel_size=3"), "no plan of 8 GPUs can train 7b"),
        (("recipe=dense_175b", "gpus=16"), "nearest found: gpus="),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_message(capsys, arguments, words):
    code, text = said(capsys, *arguments)
    if words is None:
        assert code == 0 and "Searches all parallel plans" in text
    else:
        assert code == 2 and words in text and "Traceback" not in text


def test_rows_are_predicted_and_written(capsys):
    names = "row_id,model,layers,hidden,heads,ffn_hidden,vocab,seq_len,gpus,gpu_type,global_batch,micro_batch,tp,pp,dp"
    shape = "small,24,2048,16,8192,50257,2048,8,H100,64"
    lines = (f"{names},iteration_time_s,memory_gb", f"mine:1,{shape},2,2,1,4,2.0,40", f"mine:2,{shape},2,1,1,8,1.9,50",
             "mine:3,,,,,,,2048,8,H100,64,2,1,1,8,1.9,")  # fmt: skip
    Path("runs.csv").write_text("\n".join(lines))
    code, text = said(capsys, "rows=runs.csv", "out=guess.csv")
    assert code == 0 and "step time" in text and "memory" in text and "1 row not predicted" in text
    with open("guess.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["row_id"] for row in rows] == ["mine:1", "mine:2", "mine:3"]
    assert float(rows[0]["predicted_seconds"]) > 0 and rows[0]["predicted_oom"] == "0" and rows[2]["predicted_seconds"] == ""


def test_a_measured_profile_takes_the_place_of_the_constants(capsys):
    Path("half.yaml").write_text("gpu: h100\nmatmul_efficiency: 0.2\nsource: measured by hand\n")
    _, plain = said(capsys, *SMALL, "top=1")
    code, slow = said(capsys, *SMALL, "top=1", "profile=half.yaml")
    assert code == 0 and "measured by hand" in slow and plain != slow
    code, text = said(capsys, "model=tiny", "cluster=local", "trainer.precision=32-true", "profile=half.yaml")
    assert code == 2 and "was measured on gpu=h100, and the cluster has cpu" in text


def test_this_machine_is_measured(capsys):
    code, text = said(capsys, "profile", "out=here.yaml", "gpu=cpu")
    values = yaml.safe_load(Path("here.yaml").read_text())
    assert code == 0 and "matmul_efficiency" in text
    assert values["gpu"] == "cpu" and all(values[name] > 0 for name in ("matmul_efficiency", "kernel_seconds", "nvlink_efficiency"))
    code, text = said(capsys, "model=tiny", "cluster=local", "trainer.precision=32-true", "profile=here.yaml", "top=1")
    assert code == 0 and "measured on cpu by megascale plan profile" in text


def test_torch_and_lightning_stay_out_of_it():
    script = (
        "import sys; from lightning_megascale.cli import __main__ as m; sys.argv = ['megascale', 'plan', 'model=1b', 'gpus=8', 'top=1', "
        "'png=p.png']; m.main(); assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), 'loaded'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_plan_file_comes_back_as_it_went(tmp_path):
    from lightning_megascale.planning.plan_file import write_plan

    plan = ParallelPlan(pipeline_parallel_size=2, pipeline_split=["layers.3"], microbatch_size=2, global_batch_size=8)
    write_plan(plan, tmp_path / "plan.yaml", ("a comment",))
    assert read_plan(tmp_path / "plan.yaml") == plan
    for text, words in (("[1]", "must hold fields of a plan"), ("tensor: 2", "did you mean 'tensor_parallel_size'"), ("a: [", "is no YAML"),
                        ("tensor_parallel_size: 0", "must be a whole number of at least 1")):  # fmt: skip
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_plan(tmp_path / "wrong.yaml")


def test_the_best_plan_is_placed(capsys):
    code, text = said(capsys, *SMALL, "top=1", "hosts=hosts.txt", "ranks=ranks.txt", "plan.tensor_parallel_size=2")
    hosts = Path("hosts.txt").read_text().split()
    assert code == 0 and "the slowest link is busy" in text and "placement: " in text
    assert len(hosts) == 16 and len(set(hosts)) == 2 and hosts[:8] == hosts[:1] * 8  # ranks of a node stand together
    ranks = [int(line) for line in Path("ranks.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(ranks) == list(range(16))


def test_a_real_fabric_gives_the_hosts(capsys):
    lines = ["SwitchName=a Nodes=n[1-2]", "SwitchName=b Nodes=m[1-2]", "SwitchName=top Switches=a,b"]
    Path("topology.conf").write_text("\n".join(lines))
    code, text = said(capsys, *SMALL, "fabric=topology.conf", "hosts=hosts.txt", "top=1")
    assert code == 0 and "topology.conf: 16 h100" in text
    hosts = set(Path("hosts.txt").read_text().split())
    assert hosts in ({"n1", "n2"}, {"m1", "m2"})  # below one leaf
    Path("topology.conf").write_text("SwitchName=a Nodes=n[1-")
    code, text = said(capsys, *SMALL, "fabric=topology.conf")
    assert code == 2 and "topology.conf" in text and "1" in text and "Traceback" not in text


MIXTRAL = ("model=mixtral_8x7b", "gpus=64", "batch.global_size=64", "batch.sequence_length=2048")


@pytest.mark.parametrize(
    ("shape", "plan", "words"),
    [
        (MIXTRAL, {"expert_parallel_size": 16}, "num_experts=8 is not divisible by expert_parallel_size"),
        (("model=1b", "gpus=64"), {"expert_parallel_size": 4}, "the model has no experts"),
        (("model=1b", "gpus=64"), {"tensor_parallel_size": 16}, "num_kv_heads=8 is not divisible by tensor_parallel_size"),
        (("model=1b", "gpus=64", "batch.sequence_length=4095"),
         {"context_parallel_size": 8, "label_alignment": "aligned"}, "divisible by 2 x"),
        (("model=1b", "gpus=64", "batch.global_size=48"),
         {"pipeline_parallel_size": 4, "pipeline_schedule": "Interleaved1F1B", "pipeline_stages_per_rank": 2}, "works in rounds"),
        (("model=1b", "gpus=64", "batch.global_size=16"), {"pipeline_parallel_size": 8}, "1F1B needs as many microbatches"),
        (MIXTRAL,
         {"pipeline_parallel_size": 2, "pipeline_schedule": "ZBVZeroBubble", "pipeline_stages_per_rank": 2}, "no model with experts"),
        (("model=1b", "gpus=64"), {"pipeline_parallel_size": 2, "pipeline_split": ["layers.99"]}, "estimates are for stages cut by cost"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_plan_file_that_the_model_cannot_have_is_refused(capsys, shape, plan, words):
    Path("given.yaml").write_text(yaml.safe_dump(plan))
    code, text = said(capsys, *shape, "plan_file=given.yaml")
    assert code == 2 and words in text


def test_what_no_search_chooses_is_written_and_what_no_figure_depends_on_is_said(capsys):
    given = ("plan.compile=true", "plan.reduce_dtype=bfloat16", "plan.loss_weight=labels", "plan.data_parallel_size=4")
    code, text = said(capsys, *SMALL, *given, "out=best.yaml", "top=1")
    plan = read_plan("best.yaml")
    assert code == 0 and "ignored  not modelled: compile=True" in text
    assert (plan.compile, plan.reduce_dtype, plan.loss_weight, plan.data_parallel_size) == (True, "bfloat16", "labels", 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("plan.tensor_parallel_size=3",), "tp=3: no plan of 16 GPUs has it; there are 1, 2, 4, 8"),
        (("batch.micro_size=3",), "microbatch_size=3: no plan of 16 GPUs has it; there are 1, 2, 4"),
        (("plan.expert_parallel_size=2",), "ep=2: no plan of 16 GPUs has it; there are 1"),
        (("plan.pipeline_schedule=dualpipe",), "plan.pipeline_schedule='dualpipe': must be one of GPipe, 1F1B"),
        (("plan.reduce_gradients=sometimes",), "must be one of 'last', 'every'"),
        (("batch.sequence_length=0",), "batch.sequence_length=0: must be a whole number of at least 1"),
        (("out=nowhere/plan.yaml",), "out=nowhere/plan.yaml: cannot be written"),
        (("hosts=same", "ranks=same"), "are one file; give each its own"),
        (("png=plan.txt",), "png=plan.txt: must be a .png file"),
    ],
    ids=str,
)
def test_what_was_given_wrongly_is_named_with_what_can_be(capsys, given, words):
    names = {item.partition("=")[0] for item in given}
    code, text = said(capsys, *(item for item in SMALL if item.partition("=")[0] not in names), *given)
    assert code == 2 and words in text and "Traceback" not in text


def test_an_encoder_decoder_is_told_how_long_its_source_is(capsys):
    config = {"model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
              "num_decoder_layers": 6, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"}  # fmt: skip
    Path("t5").mkdir()
    Path("t5/config.json").write_text(json.dumps(config))
    code, text = said(capsys, "hf=t5", "gpus=8", "top=1", "source_length=512", "batch.sequence_length=128")
    assert code == 0 and "dp_" in text
    code, text = said(capsys, "hf=t5", "gpus=8")
    assert code == 2 and "source_length=None: must be given" in text


def test_a_node_of_another_kind_than_the_clusters_is_refused(capsys):
    ports = "".join(f'<pci busid="s{i}"><pci busid="g{i}" class="0x0302"/><pci busid="n{i}" class="0x0207"/></pci>' for i in range(8))
    Path("topo.xml").write_text(f"<system><cpu>{ports}</cpu></system>")
    code, text = said(capsys, *SMALL, "nccl=topo.xml", "top=1")
    assert code == 0 and "dp_" in text
    code, text = said(capsys, "model=7b", "cluster=gb200_nvl72", "nccl=topo.xml", "top=1")
    assert code == 2 and "node.gpus=4: the file has 8 GPUs" in text

"""``init_from`` on the command line: a run from an export, one from a Hugging Face folder; what is no path is named before ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lightning_megascale.cli import resume, values
from lightning_megascale.cli.errors import UserError
from tests.cli.run_megascale import TINY, megascale
from tests.cli.test_train import options

FROZEN = ["optim.lr=1e-30", "trainer.max_steps=3", "callbacks=default"]  # three steps that change nothing


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wights", "init_from=wights: there is no such file or folder; did you mean 'weights'?"),
        ("nothing/at/all", "init_from=nothing/at/all: there is no such file or folder"),
        (3, "init_from=3: must be a path, such as a Hugging Face folder, or a name of its hub"),
        ({"text": "weights", "image": "wights"}, "init_from.image=wights: there is no such file or folder"),
    ],
)
def test_what_is_no_path_is_named(value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        values.check_init_from(value)
    for fine in (None, "weights", "org/name", "org/name@main", {"text": "weights"}):
        values.check_init_from(fine)


def test_a_run_with_other_first_weights_is_another_run(tmp_path: Path) -> None:
    resume.write_config(options(tmp_path, init_from="a"))
    (tmp_path / "checkpoints" / "last.ckpt").mkdir(parents=True)
    for name, text in ((".metadata", ""), ("megascale.json", '{"step": 1, "files": {}}')):
        (tmp_path / "checkpoints" / "last.ckpt" / name).write_text(text)
    with pytest.raises(UserError, match="init_from: a there, b now"):
        resume.decide(options(tmp_path, init_from="b"))
    assert resume.decide(options(tmp_path, init_from="a")).checkpoint
    assert resume.fingerprint(options(tmp_path)) == resume.fingerprint(options(tmp_path, init_from=None))  # as before there was such a key


@pytest.mark.slow
def test_a_run_from_an_export_and_its_resume_without_it(tmp_path: Path) -> None:
    first = megascale("train", *TINY, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    done = megascale("checkpoint", "export", "runs/quickstart/checkpoints/last.ckpt", "out", "format=safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = megascale("train", *TINY, *FROZEN, "run.name=second", "init_from=out", "plan=tp2", cwd=tmp_path)
    assert again.returncode == 0 and "from   weights of out" in again.stdout, again.stdout + again.stderr
    done = megascale("checkpoint", "export", "runs/second/checkpoints/last.ckpt", "out2", "format=safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("out", "out2"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    (tmp_path / "out").rename(tmp_path / "away")
    longer = [*TINY, *FROZEN, "trainer.max_steps=5", "run.name=second", "init_from=out", "plan=tp2"]
    resumed = megascale("train", *longer, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout and "weights of out" not in resumed.stdout, resumed.stderr
    refused = megascale("train", *TINY, "run.name=third", "init_from=out", cwd=tmp_path)
    assert refused.returncode == 2 and "init_from=out: there is no such file or folder" in refused.stderr


@pytest.mark.slow
def test_a_hugging_face_model_from_its_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "llama.yaml").write_text(
        "_target_: transformers.AutoModelForCausalLM.from_config\n"
        "config:\n  _target_: transformers.AutoConfig.from_pretrained\n  pretrained_model_name_or_path: hf\n"
    )
    keys = [
        *TINY[1:],
        *FROZEN,
        "--config-dir",
        "own",
        "model=llama",
        "data.vocab_size=512",
        "init_from=hf",
        "plan=tp2",
        "plan.sequence_parallel=false",
    ]
    done = megascale("train", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = megascale("checkpoint", "export", "runs/quickstart/checkpoints/last.ckpt", "out", "format=safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())

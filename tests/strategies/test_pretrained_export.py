"""An export of a transformers model is a folder that transformers reads: config, tokenizer, dtype, tied weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from lightning_megascale.cli.checkpoint import main
from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint.huggingface import tokenizers_of
from tests.harness import worst
from tests.huggingface import FAMILIES


class Module(L.LightningModule):
    def __init__(self, model: nn.Module, **others: Any) -> None:
        super().__init__()
        self.model = model
        for name, other in others.items():
            setattr(self, name, other)


def tied() -> nn.Module:
    config = FAMILIES["Llama"]().config
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


def words() -> transformers.PreTrainedTokenizerFast:
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), unk_token="?", pad_token="b")


class Broken:
    def save_pretrained(self, folder: str) -> None:
        raise OSError("the vocabulary is gone")


def saved(module: L.LightningModule, folder: Path, **options: Any) -> Path:
    checkpoints.save(folder, {"global_step": 4}, module, **options)
    return folder


def exported(source: Path, *keys: str) -> Path:
    """By the command line, beside the checkpoint."""
    out = source.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    assert main(["export", str(source), str(out), "format=safetensors", *keys]) == 0
    return out


def test_config_generation_config_and_tokenizer_come_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = tied()
    model.generation_config.max_new_tokens = 17
    module = Module(model, config=transformers.PretrainedConfig(width=3))  # of the user's own, and no model's
    source = saved(module, tmp_path / "x.ckpt", tokenizers=[words()])
    assert checkpoints.check(source).complete
    out = exported(source)
    printed = capsys.readouterr().out
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"}
    assert names < {path.name for path in out.iterdir()} and all(str(out / name) in printed for name in names)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert worst(model.state_dict(), again.state_dict())[0] == 0
    assert again.lm_head.weight is again.model.embed_tokens.weight and again.generation_config.max_new_tokens == 17
    assert "lm_head.weight" not in load_file(next(out.glob("*.safetensors")))
    assert transformers.AutoTokenizer.from_pretrained(out)("b?a", return_tensors="pt") is not None
    assert transformers.AutoTokenizer.from_pretrained(out).get_vocab() == {"a": 0, "b": 1, "?": 2}
    (source / "huggingface" / "model" / "config.json").unlink()
    assert "huggingface/model/config.json is missing" in checkpoints.check(source).problems[0]


def test_resharding_keeps_config_and_tokenizer(tmp_path: Path) -> None:
    source = saved(Module(tied()), tmp_path / "x.ckpt", tokenizers=[words()])
    checkpoints.reshard_checkpoint(source, tmp_path / "y.ckpt")
    assert checkpoints.check(tmp_path / "y.ckpt").complete
    assert (tmp_path / "y.ckpt/tokenizer/tokenizer.json").read_text() == (source / "tokenizer/tokenizer.json").read_text()
    assert transformers.AutoModelForCausalLM.from_pretrained(exported(tmp_path / "y.ckpt")).config.tie_word_embeddings


def test_other_dtypes_halve_the_file_and_tell_the_config(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"]()
    source = saved(Module(model), tmp_path / "x.ckpt")
    out = exported(source, "dtype=bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16 and json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert worst({name: tensor.bfloat16() for name, tensor in model.state_dict().items()}, again.state_dict())[0] == 0
    (file,) = out.glob("*.safetensors")
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert 0.5 * whole < file.stat().st_size < 0.55 * whole
    assert exported(source, "dtype=float64") and transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float64


def test_a_tokenizer_from_another_folder(tmp_path: Path) -> None:
    source = saved(Module(tied()), tmp_path / "x.ckpt")
    words().save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "model.safetensors").write_text("weights, which are not copied")
    out = exported(source, f"tokenizer={tmp_path / 'words'}")
    assert transformers.AutoTokenizer.from_pretrained(out).get_vocab() == {"a": 0, "b": 1, "?": 2}
    assert not (out / "model.safetensors").exists()


def test_a_single_file_takes_the_config_from_a_folder(tmp_path: Path) -> None:
    """A ``.ckpt`` of the plain Trainer has none."""
    torch.manual_seed(0)
    model = FAMILIES["Mixtral"]()
    torch.save({"state_dict": Module(model).state_dict(), "epoch": 1}, tmp_path / "x.ckpt")
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path / "from")
    out = exported(tmp_path / "x.ckpt", f"config={tmp_path / 'from'}")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert worst(model.state_dict(), again.state_dict())[0] == 0
    assert any("block_sparse_moe.experts.3.w2" in name for name in load_file(next(out.glob("*.safetensors"))))


def test_other_modules_are_left_out_and_named_and_one_of_two_models_is_chosen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Module(tied(), image=FAMILIES["Siglip"](), probe=nn.Linear(2, 1))
    source = saved(module, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"holds 2 Hugging Face models: choose one with prefix=image\. or prefix=model\."):
        checkpoints.export(source, tmp_path / "no", "safetensors")
    with pytest.warns(UserWarning, match=r"left out, since they are no part of image\.\*: model\.model\.embed_tokens"):
        (file, *_) = checkpoints.export(source, tmp_path / "image", "safetensors", prefix="image.")
    again = transformers.AutoModel.from_pretrained(file.parent)
    assert worst(module.image.state_dict(), again.state_dict())[0] == 0
    (file, *_) = checkpoints.export(source, tmp_path / "all", "safetensors", prefix="")
    assert load_file(file).keys() == module.state_dict().keys()


def test_a_model_of_a_class_of_ones_own_keeps_its_names_and_config(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.PretrainedConfig(width=3)
            self.layer, self.twin = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.twin.weight = self.layer.weight

    source = saved(Module(Own()), tmp_path / "x.ckpt")
    out = exported(source)
    assert json.loads((out / "config.json").read_text())["width"] == 3
    assert load_file(next(out.glob("*.safetensors"))).keys() == {"layer.weight"}


def test_a_transformers_model_inside_of_a_wrapper_is_what_is_exported(tmp_path: Path) -> None:
    wrapper = nn.Module()
    wrapper.backbone, wrapper.config = tied(), transformers.PretrainedConfig(width=3)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported(saved(Module(wrapper), tmp_path / "x.ckpt")))
    assert worst(wrapper.backbone.state_dict(), again.state_dict())[0] == 0


def test_what_cannot_be_read_back_is_refused(tmp_path: Path) -> None:
    changed = tied()
    changed.model.layers[0].mlp.up_proj = nn.Sequential(changed.model.layers[0].mlp.up_proj)  # as adapters do
    source = saved(Module(changed), tmp_path / "adapter.ckpt")
    with pytest.raises(ValueError, match=r"is no plain LlamaForCausalLM any more(.|\n)*not in it: model.layers.0.mlp.up_proj.weight"):
        checkpoints.export(source, tmp_path / "no", "safetensors")
    untied = tied()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach() + 1)
    source = saved(Module(untied), tmp_path / "untied.ckpt")
    with pytest.raises(ValueError, match=r"model.model.embed_tokens.weight and model.lm_head.weight differ in .*tie_word_embeddings=False"):
        checkpoints.export(source, tmp_path / "no", "safetensors")
    with torch.no_grad():
        untied.lm_head.weight.sub_(1)
        untied.model.embed_tokens.weight.copy_(untied.lm_head.weight)
    source = saved(Module(untied), tmp_path / "equal.ckpt")
    assert transformers.AutoModelForCausalLM.from_pretrained(exported(source)).lm_head.weight is not None
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["dtype=int8"], "dtype=int8: must be a floating-point dtype"),
        (["dtype=float31"], "dtype=float31: must be a floating-point dtype"),
        (["tokenizer=NOTHING"], "tokenizer=NOTHING: there is no such folder"),
        (["tokenizer=EMPTY"], "there are no tokenizer files in it"),
        (["config=EMPTY"], "there is no config.json in it"),
        (["format=ckpt", "dtype=bfloat16"], "dtype: only format=safetensors takes it"),
        (["tokeniser=EMPTY"], "no key 'tokeniser'; did you mean 'tokenizer'?"),
    ],
)
def test_mistakes_are_one_message(
    keys: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    saved(Module(tied()), tmp_path / "x.ckpt")
    format = [] if any(key.startswith("format") for key in keys) else ["format=safetensors"]
    assert main(["export", "x.ckpt", "out", *format, *keys]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp-*"))


def test_tokenizers_are_found_and_one_that_cannot_be_saved_does_not_lose_the_checkpoint(tmp_path: Path) -> None:
    one, other = words(), Broken()
    module = Module(tied(), tokenizer=one)
    data = type("Data", (), {"tokenizer": one, "processor": other})()
    assert tokenizers_of(module, data) == [one, other] and tokenizers_of(module, None) == [one]
    with pytest.warns(UserWarning, match="the checkpoint has no tokenizer: Broken.save_pretrained failed: the vocabulary is gone"):
        source = saved(module, tmp_path / "x.ckpt", tokenizers=[other])
    assert checkpoints.check(source).complete

"""MegascaleModule under a plain Trainer: numbers, logs, checkpoints, models of others, generation, and what is refused."""

import math
from dataclasses import asdict

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.module import MegascaleModule
from lightning_megascale.optim import build_optimizer, cosine_schedule
from lightning_megascale.parallel.init import materialize
from tests.harness import run_ranks

MODEL = {"preset": "tiny", "vocab_size": 64, "hidden_size": 32, "num_layers": 1, "intermediate_size": 48}


def rows(count, seed=0, length=12):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(count):
        input_ids = torch.randint(64, (length,), generator=generator)
        labels = input_ids.clone()
        labels[: (index * 5) % length] = -100  # rows weigh differently
        result.append({"input_ids": input_ids, "labels": labels})
    return result


def batches(count=6, size=2, seed=0):
    return DataLoader(rows(count * size, seed), batch_size=size)


class Logged(pl.Callback):
    """What stands in the Trainer's metrics when callbacks see the end of a batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({key: value.item() for key, value in trainer.callback_metrics.items()})


def fit(module, loader=None, validation=None, folder=None, callbacks=(), **options):
    options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False} | options
    trainer = pl.Trainer(
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks), num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    trainer.fit(module, loader or batches(), validation)
    return trainer


def hand_loss(model, batch):
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def hand_training(seed=3, accumulate=1, clip=0.5, warmup=2, steps=6):
    """A loop without Lightning in float64: losses, norms, rates and the model at the end."""
    pl.seed_everything(seed, verbose=False)
    with torch.device("meta"):
        model = Decoder(MegascaleModule(MODEL)._config).double()
    materialize(model, "cpu", seed)
    optimizer = build_optimizer(model.named_parameters(), lr=0.01)
    factor, rows_, sums = cosine_schedule(warmup, steps, 0.1), [], torch.zeros(2, dtype=torch.float64)
    for index, batch in enumerate(batches()):
        loss, count = hand_loss(model, batch)
        (loss / count / accumulate).backward()
        sums += torch.stack([loss.detach(), count])
        if (index + 1) % accumulate:
            continue
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor(len(rows_))
        optimizer.step()
        optimizer.zero_grad()
        rows_.append({"train/loss": (sums[0] / sums[1]).item(), "train/grad_norm": norm.item(), "train/lr": 0.01 * factor(len(rows_))})
        sums = torch.zeros_like(sums)
    return rows_, model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_a_hand_written_loop(accumulate):
    steps = 6 // accumulate
    expected, model = hand_training(accumulate=accumulate, steps=steps)
    pl.seed_everything(3, verbose=False)
    module = MegascaleModule(MODEL, {"lr": 0.01}, {"warmup_steps": 2})  # total_steps follow from the Trainer
    assert module.model is None
    logged = Logged()
    fit(module, callbacks=[logged], gradient_clip_val=0.5, accumulate_grad_batches=accumulate, precision="64-true")
    seen = logged.seen[accumulate - 1 :: accumulate]
    assert len(seen) == len(expected) == steps and expected[0]["train/grad_norm"] > 0.5
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours == {key: pytest.approx(value, rel=1e-6 if key == "train/lr" else 1e-9) for key, value in theirs.items()}
    for (name, parameter), reference in zip(module.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=0, atol=1e-10, msg=name)


def test_validation_and_test_are_exact_token_means():
    pl.seed_everything(1, verbose=False)
    module = MegascaleModule({**MODEL, "init_std": 0.5}, {"lr": 0.0})
    trainer = fit(module, validation=batches(5, 3, seed=9))
    totals = [hand_loss(module.model, batch) for batch in batches(5, 3, seed=9)]
    expected = sum(loss for loss, _ in totals).item() / sum(count for _, count in totals).item()
    naive = sum((loss / count).item() for loss, count in totals) / 5
    assert abs(naive - expected) > 1e-3 * expected
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(expected, rel=1e-6)
    assert trainer.test(module, batches(5, 3, seed=9), verbose=False)[0]["test/loss"] == pytest.approx(expected, rel=1e-6)


def validate_on_two_ranks():
    pl.seed_everything(1, verbose=False)
    module = MegascaleModule(MODEL)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False, **quiet)
    rank = torch.distributed.get_rank()
    mine = DataLoader(rows(4, seed=9)[2 * rank : 2 * rank + 2], batch_size=1)
    return trainer.validate(module, mine, verbose=False)[0]["val/loss"]


def test_validation_over_ranks_is_an_exact_token_mean():
    pl.seed_everything(1, verbose=False)
    module = MegascaleModule(MODEL)
    module.configure_model()
    with torch.no_grad():
        totals = [hand_loss(module.model, {key: value[None] for key, value in row.items()}) for row in rows(4, seed=9)]
    counts = [count.item() for _, count in totals]
    assert sum(counts) % 2 and len(set(counts)) > 2  # an integer mean over two ranks would be cut
    expected = sum(loss for loss, _ in totals).item() / sum(counts)
    assert run_ranks(validate_on_two_ranks, 2) == [pytest.approx(expected, rel=1e-6)] * 2


def test_a_strategy_that_sums_losses_gets_sums_and_its_loss_is_logged():
    given = []

    class Sums(SingleDeviceStrategy):
        accepts_loss_sum = True
        step_loss = grad_norm = None

        def setup(self, trainer):
            assert all(parameter.is_meta for parameter in self.lightning_module.parameters())
            materialize(self.lightning_module, "cpu", 3)
            super().setup(trainer)

        def training_step(self, *arguments):
            output = super().training_step(*arguments)
            given.append(output)
            self.step_loss, self.grad_norm = output["loss_sum"].detach() * 2, torch.tensor(7.0)
            return {**output, "loss": output["loss_sum"] / output["num_tokens"]}

    module = MegascaleModule(MODEL, {"lr": 0.01})
    logged = Logged()
    fit(module, batches(2), strategy=Sums(device=torch.device("cpu")), callbacks=[logged])
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches(2)]
    assert [output["num_tokens"] for output in given] == counts
    assert [row["train/loss"] for row in logged.seen] == [2 * output["loss_sum"].item() for output in given]
    assert logged.seen[-1]["train/grad_norm"] == 7.0


def test_labels_aligned_and_padding():
    module = MegascaleModule(MODEL)
    module.configure_model()
    batch = next(iter(batches(1, 3)))
    loss, count = module.loss(batch)
    torch.testing.assert_close(loss, hand_loss(module.model, batch)[0], rtol=1e-5, atol=0)
    aligned = MegascaleModule(MODEL, label_shift=False)
    aligned.model = module.model
    moved = torch.cat([batch["labels"][:, 1:], torch.full((3, 1), -100)], 1)
    assert torch.equal(aligned.loss({**batch, "labels": moved})[0], loss)
    assert not torch.equal(aligned.loss(batch)[0], loss)

    padded = {"input_ids": F.pad(batch["input_ids"], (0, 4)), "labels": F.pad(batch["labels"], (0, 4)),
              "attention_mask": F.pad(torch.ones_like(batch["labels"]), (0, 4))}  # fmt: skip
    more, same = module.loss(padded)
    assert same == count
    torch.testing.assert_close(more, loss, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="attention_mask is 0 at the start of a row: pad on the right"):
        module.loss({**padded, "attention_mask": padded["attention_mask"].flip(1)})


def test_position_ids_reach_the_model():
    module = MegascaleModule({**MODEL, "init_std": 0.3})
    module.configure_model()
    batch = next(iter(batches(1)))
    reversed_ = torch.arange(12).flip(0).expand(2, 12)
    assert module.loss({**batch, "position_ids": reversed_})[0] != module.loss(batch)[0]


def test_load_from_checkpoint_and_resume(tmp_path):
    pl.seed_everything(1, verbose=False)
    module = MegascaleModule(
        {**MODEL, "tie_embeddings": True}, {"lr": 0.01, "lr_patterns": {"norm": 0.02}}, {"kind": "constant", "warmup_steps": 3}
    )
    same = DataLoader([rows(1)[0]] * 12, batch_size=2)  # Lightning starts the epoch again after a resume
    trainer = fit(module, same, folder=tmp_path, max_steps=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = MegascaleModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.hparams == module.hparams and loaded.hparams.model == asdict(module._config)
    assert loaded.model.head.weight is loaded.model.embed_tokens.weight
    for (name, ours), theirs in zip(loaded.model.named_parameters(), module.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    whole, resumed = Logged(), Logged()
    again = lambda: MegascaleModule(**module.hparams)  # noqa: E731
    pl.seed_everything(1, verbose=False)
    fit(again(), same, folder=tmp_path, max_steps=6, callbacks=[whole])
    trainer = pl.Trainer(max_steps=6, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False, callbacks=[resumed])  # fmt: skip
    trainer.fit(again(), same, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert resumed.seen == whole.seen[4:] and len(resumed.seen) == 2


def test_the_start_depends_on_the_seed_alone():
    states = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        torch.randn(seed)  # what was drawn before does not matter
        module = MegascaleModule(MODEL)
        module.configure_model()
        first = module.model
        module.configure_model()
        assert module.model is first
        states.append(module.model.head.weight)
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


class Bigram(torch.nn.Module):
    """Plain logits from input_ids alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 64)

    def forward(self, input_ids):
        return self.table(input_ids)


class ListModel(Bigram):
    def forward(self, input_ids):
        return [self.table(input_ids)]


def huggingface():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize("model", [Bigram, huggingface, Bigram()])
def test_models_of_others(model, tmp_path):
    module = MegascaleModule(model, {"lr": 0.01})
    trainer = fit(module, batches(3), batches(1, 2, seed=5))
    batch = next(iter(batches(1, 2, seed=5)))
    module.eval()
    with torch.no_grad():
        output = module.model(batch["input_ids"])
        logits = getattr(output, "logits", output)
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        torch.testing.assert_close(trainer.callback_metrics["val/loss"], expected, rtol=1e-5, atol=0)
        padded = {**batch, "attention_mask": torch.ones_like(batch["labels"]), "__key__": ["a", "b"]}
        torch.testing.assert_close(module.loss(padded)[0], module.loss(batch)[0], rtol=1e-5, atol=0)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = MegascaleModule.load_from_checkpoint(tmp_path / "a.ckpt", model=model).eval()
    torch.testing.assert_close(loaded.loss(batch)[0], module.loss(batch)[0], rtol=1e-6, atol=0)


def test_predict():
    module = MegascaleModule(MODEL)
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    logits = trainer.predict(module, DataLoader([{"input_ids": row["input_ids"]} for row in rows(2)], batch_size=2))[0]
    torch.testing.assert_close(logits, module.model(torch.stack([row["input_ids"] for row in rows(2)])))


def test_generate():
    pl.seed_everything(1, verbose=False)
    module = MegascaleModule({**MODEL, "init_std": 0.5, "max_position_embeddings": 16, "dropout": 0.5})
    module.configure_model()
    prompt = torch.stack([row["input_ids"] for row in rows(3, length=6)])
    out = module.generate(prompt, 14)
    assert module.model.training and out.shape == (3, 20) and torch.equal(out[:, :6], prompt)
    module.model.eval()
    for end in range(6, 20):  # token by token, without padding; beyond 16 the window slides
        logits = module.model(out[:, max(0, end - 16) : end])[:, -1]
        assert torch.equal(out[:, end], logits.argmax(-1)), end
    sample = lambda seed, temperature: module.generate(prompt, 8, temperature, torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(sample(1, 1.0), sample(1, 1.0)) and not torch.equal(sample(1, 1.0), sample(2, 1.0))
    assert torch.equal(sample(1, 1e-4), out[:, :14])


def test_sampling_follows_the_softmax():
    module = MegascaleModule(Bigram())
    with torch.no_grad():
        module.model.table.weight.zero_()
        module.model.table.weight[:, 2:] = -torch.inf
        module.model.table.weight[:, 1] = 2 * math.log(3.0)
    out = module.generate(torch.zeros(4000, 1, dtype=torch.long), 1, temperature=2.0, generator=torch.Generator().manual_seed(0))
    assert abs(out[:, 1].float().mean().item() - 0.75) < 0.03  # odds 3 : 1


def test_config_sources():
    assert MegascaleModule("small")._config == PRESETS["small"]
    assert MegascaleModule(PRESETS["tiny"])._config == PRESETS["tiny"]
    changed = MegascaleModule({"preset": "tiny", "num_heads": 8})._config
    assert (changed.num_heads, changed.num_kv_heads, changed.head_dim) == (8, 8, 8)
    kept = MegascaleModule({"preset": "small", "num_heads": 16})._config
    assert (kept.num_kv_heads, kept.head_dim) == (4, 20)
    assert isinstance(MegascaleModule(MODEL)._config, DecoderConfig)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "tinny"}, "model='tinny': no such preset; did you mean 'tiny'?"),
        ({"model": 3}, "model is a int: must be a preset's name"),
        ({"model": {"preset": "tiny", "num_layer": 3}}, "no key 'num_layer'; did you mean 'num_layers'?"),
        ({"optimizer": {"learning_rate": 3}}, "optimizer has no argument 'learning_rate'"),
        ({"optimizer": {"betas": (0.9, 0.9)}}, "optimizer needs lr"),
        ({"schedule": {"kind": "cosin"}}, "kind='cosin': must be one of"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 1}}, "wsd schedule needs decay_steps"),
        ({"schedule": {"warmup": 1}}, "no argument 'warmup'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, message):
    with pytest.raises(ValueError) as error:
        MegascaleModule(**arguments)
    assert message in str(error.value)


def test_wrong_batches_are_refused():
    module = MegascaleModule(MODEL)
    with pytest.raises(RuntimeError, match="configure_model"):
        module(torch.zeros(1, 1, dtype=torch.long))
    module.configure_model()
    batch = next(iter(batches(1)))
    with pytest.raises(ValueError, match="the batch has no labels, only input_ids"):
        module.loss({"input_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match="the batch has document_ids, and ListModel attends to rows as a whole"):
        MegascaleModule(ListModel()).loss({**batch, "document_ids": torch.zeros(2, 12)})
    with pytest.raises(ValueError, match="the model returned list: it must return logits"):
        MegascaleModule(ListModel()).loss(batch)
    with pytest.raises(ValueError, match="must be .rows, tokens. with at least one token"):
        module.generate(torch.zeros(2, 0, dtype=torch.long), 3)


def test_open_steps_follow_from_the_trainer_or_are_asked_for():
    module = MegascaleModule(MODEL, {"lr": 1.0, "eps": 1.0}, {"kind": "wsd", "warmup_steps": 0, "decay_steps": 2, "min_ratio": 0.5})
    logged = Logged()
    fit(module, callbacks=[logged])
    assert [row["train/lr"] for row in logged.seen] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75]
    endless = MegascaleModule(MODEL, schedule={"warmup_steps": 1})
    with pytest.raises(ValueError, match="total_steps is left out and the Trainer has no end known in steps"):
        fit(endless, max_epochs=-1, max_steps=-1)
    short = MegascaleModule(MODEL, schedule={"kind": "wsd", "warmup_steps": 5, "decay_steps": 2})
    with pytest.raises(ValueError, match="warmup_steps . decay_steps = 7, must be at most the 6 steps"):
        fit(short)


def test_routers_learn_from_steps_under_lightnings_own_strategy() -> None:
    """The bias moves by its rate, and the loads are those of the step's tokens."""
    config = dict(asdict(PRESETS["tiny_moe"]), balance_bias_rate=0.25)
    module = MegascaleModule(config)
    ids = torch.randint(1, 500, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    pl.Trainer(devices=1, max_steps=1, **options).fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    router = module.model.layers[1].mlp.router  # type: ignore[union-attr, index]
    assert float(router.last_step.sum()) == 2 * 16 * 2
    mean = router.last_step.mean()
    assert torch.equal(router.expert_bias, 0.25 * torch.sign(mean - router.last_step).float())

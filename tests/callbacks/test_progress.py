"""TrainProgress and TextSample: what a user reads."""

from types import SimpleNamespace

import pytest
import torch

from lightning_megascale.callbacks.progress import TrainProgress, _clock
from lightning_megascale.callbacks.sample import TextSample


def trainer(step, total=10, **metrics):
    values = {name.replace("_", "/", 1): torch.tensor(value) for name, value in metrics.items()}
    return SimpleNamespace(
        global_step=step, callback_metrics=values, sanity_checking=False, is_global_zero=True, estimated_stepping_batches=total
    )


def test_plain_lines_hold_step_losses_throughput_and_time(capsys, monkeypatch):
    now = iter([100.0, 110.0, 140.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    bar = TrainProgress()
    bar.on_train_start(trainer(0), None)
    bar.on_train_batch_end(trainer(2, train_loss=3.14159, perf_tokens_per_second=12345.6))
    bar.on_train_end(trainer(10, train_loss=2.0, val_loss=2.5), None)
    assert capsys.readouterr().out.splitlines() == [
        "step 2/10  loss 3.142  12,346 tokens/s  ETA 0:40",
        "step 10/10  loss 2.000  val 2.500  took 0:40",
    ]


def test_lines_are_apart(capsys, monkeypatch):
    now = iter([100.0, 101.0, 109.9, 110.0, 111.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    bar = TrainProgress(plain_seconds=10)
    bar.on_train_start(trainer(0), None)
    for step in (1, 2, 3, 4):
        bar.on_train_batch_end(trainer(step))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3/10"]


def test_a_disabled_bar_is_silent(capsys):
    bar = TrainProgress(plain_seconds=0)
    bar.disable()
    bar.on_train_start(trainer(0), None)
    bar.on_train_batch_end(trainer(1))
    assert capsys.readouterr().out == ""


def test_clock():
    assert [_clock(seconds) for seconds in (0, 59.6, 3599, 3600, 36061)] == ["0:00", "1:00", "59:59", "1:00:00", "10:01:01"]


class Words:
    """A tokenizer of two words."""

    def __call__(self, text):
        return {"input_ids": [["a", "b"].index(word) for word in text.split()]}

    def decode(self, tokens):
        return " ".join("ab"[token] for token in tokens)


def test_the_sample_continues_the_prompt():
    class Module:
        def generate(self, input_ids, tokens, temperature, generator):
            assert input_ids.tolist() == [[0, 1]] and temperature == 0.5
            return torch.cat([input_ids, torch.ones(1, tokens, dtype=torch.long)], dim=1)

    sample = TextSample("a b", tokens=3, temperature=0.5)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    sample.on_train_end(SimpleNamespace(datamodule=SimpleNamespace(tokenizer=Words()), strategy=strategy), Module())
    assert sample.text == "a b b b b"


def test_a_sample_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="needs a data module with a tokenizer.*~callbacks.sample removes it"):
        TextSample("a").on_train_end(SimpleNamespace(datamodule=None), object())
    with pytest.raises(ValueError, match="tokens=0"):
        TextSample("a", tokens=0)

"""LossCurve: what it keeps, through thinning and resumes, the average it draws, and a picture that exists."""

from types import SimpleNamespace

import pytest
import torch

from lightning_megascale.callbacks.curve import _MOST_POINTS, LossCurve, draw, smooth


def trainer(step, **metrics):
    values = {name.replace("_", "/"): torch.tensor(value) for name, value in metrics.items()}
    return SimpleNamespace(global_step=step, callback_metrics=values, sanity_checking=False, is_global_zero=True)


def test_each_step_is_noted_once(tmp_path):
    curve = LossCurve(tmp_path / "loss.png")
    for step in (1, 1, 2):  # two batches of one accumulation, then a step
        curve.on_train_batch_end(trainer(step, train_loss=float(step)))
    curve.on_validation_end(trainer(2, val_loss=5.0, train_loss=2.0), None)
    assert curve.losses == {"train/loss": [(1, 1.0), (2, 2.0)], "val/loss": [(2, 5.0)]}


def test_a_resumed_run_goes_on_where_its_checkpoint_stood(tmp_path):
    curve, resumed = LossCurve(tmp_path / "a.png"), LossCurve(tmp_path / "b.png")
    for step in range(1, 6):
        curve.on_train_batch_end(trainer(step, train_loss=float(step)))
        if step == 3:
            resumed.load_state_dict(curve.state_dict())
    for step in range(4, 6):
        resumed.on_train_batch_end(trainer(step, train_loss=float(step)))
    assert resumed.losses == curve.losses


def test_a_long_run_is_thinned_evenly(tmp_path):
    curve = LossCurve(tmp_path / "loss.png")
    for step in range(1, 3 * _MOST_POINTS):
        curve.on_train_batch_end(trainer(step, train_loss=1.0))
    steps = [step for step, _ in curve.losses["train/loss"]]
    assert len(steps) <= _MOST_POINTS and steps[-1] >= 3 * _MOST_POINTS - 5
    assert {after - before for before, after in zip(steps, steps[1:])} == {4}


def test_the_average_has_no_bias_at_its_start():
    assert [loss for _, loss in smooth([(1, 7.0), (2, 7.0), (9, 7.0)])] == pytest.approx([7.0] * 3, abs=1e-12)
    (_, first), (_, second) = smooth([(1, 1.0), (2, 2.0)], share=0.5)
    assert (first, second) == pytest.approx((1.0, (0.5 * 0.5 * 1.0 + 0.5 * 2.0) / 0.75), abs=1e-12)


def test_the_picture_survives_a_loss_that_is_not_finite(tmp_path):
    from PIL import Image

    draw({"train/loss": [(1, 3.0), (2, float("nan")), (3, 2.0)], "val/loss": [(3, 2.5)]}, tmp_path / "deep" / "loss.png")
    with Image.open(tmp_path / "deep" / "loss.png") as image:
        assert image.size == (960, 540)
        assert len(image.convert("RGB").getcolors(10**6)) > 50  # lines were drawn

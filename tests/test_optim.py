"""Parameter groups, the fused optimizer, schedules at their corners, and what is refused."""

import copy
import math
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.optim import build_optimizer, build_scheduler, cosine_schedule, matches, wsd_schedule
from tests.harness import run_ranks


def names_of(group, model):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in group["params"]]


def test_decay_groups():
    model = Decoder(PRESETS["tiny"])
    optimizer = build_optimizer(model.named_parameters(), lr=0.1, weight_decay=0.3)
    by_decay = {group["weight_decay"]: names_of(group, model) for group in optimizer.param_groups}
    assert set(by_decay) == {0.0, 0.3} and len(optimizer.param_groups) == 2
    assert by_decay[0.0] == [name for name, _ in model.named_parameters() if "norm" in name]
    assert len(by_decay[0.3]) + len(by_decay[0.0]) == len(list(model.parameters()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95) and optimizer.param_groups[0]["eps"] == 1e-8


def test_learning_rates_by_pattern_the_first_counts_and_frozen_parameters_stay_out():
    model = Decoder(PRESETS["tiny"])
    model.head.weight.requires_grad_(False)
    optimizer = build_optimizer(
        model.named_parameters(), lr=0.1, lr_patterns={"embed_tokens": 0.5, "layers.*.attention.?_proj.weight": 0.2, "layers.0": 0.3},
        no_decay=["embed_tokens"],
    )  # fmt: skip
    rates = {name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in names_of(group, model)}
    assert "head.weight" not in rates and len(rates) == len(list(model.parameters())) - 1
    assert rates["embed_tokens.weight"] == (0.5, 0.0)
    assert rates["layers.0.attention.q_proj.weight"] == rates["layers.1.attention.o_proj.weight"] == (0.2, 0.1)
    assert rates["layers.0.mlp.up_proj.weight"] == (0.3, 0.1) and rates["layers.0.mlp_norm.weight"] == (0.3, 0.0)
    assert rates["layers.1.mlp.up_proj.weight"] == (0.1, 0.1) and rates["norm.weight"] == (0.1, 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("layers.0.attention_norm.weight", "norm", True),
        ("norm.weight", "norm", True),
        ("normalizer.weight", "norm", False),
        ("layers.10.w", "layers.1", False),
        ("layers.1.w", "layers.1", True),
        ("a.b.w", "a.*.w", True),
        ("x.a.b.w", "a.*.w", False),
    ],
)
def test_patterns(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_a_step_is_that_of_the_published_algorithm():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    bias = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    before = [weight.detach().clone(), bias.detach().clone()]
    optimizer = build_optimizer([("w.weight", weight), ("w.bias", bias)], lr=0.01, weight_decay=0.2)
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in before]
    for step in range(1, 4):
        for index, parameter in enumerate((weight, bias)):
            parameter.grad = torch.randn_like(parameter)
            first, second = moments[index]
            first.mul_(0.9).add_(0.1 * parameter.grad)
            second.mul_(0.95).add_(0.05 * parameter.grad**2)
            update = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
            before[index] = before[index] - 0.01 * update - 0.01 * (0.2 if index == 0 else 0.0) * before[index]
        optimizer.step()
    torch.testing.assert_close(weight.detach(), before[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(bias.detach(), before[1], rtol=0, atol=1e-12)


def test_fused_where_it_can_be():
    real = [("w", torch.nn.Parameter(torch.zeros(2, 2)))]
    meta = [("w", torch.nn.Parameter(torch.zeros(2, 2, device="meta")))]
    assert build_optimizer(real, lr=1.0).defaults["fused"] is True
    assert build_optimizer(real, lr=1.0, fused=False).defaults["fused"] is False
    assert build_optimizer(meta, lr=1.0).defaults["fused"] is False
    with pytest.raises(ValueError, match="fused=True: 'w' must be a floating-point tensor on CPU or CUDA"):
        build_optimizer(meta, lr=1.0, fused=True)
    with pytest.raises(ValueError, match="fused='yes'"):
        build_optimizer(real, lr=1.0, fused="yes")


def test_fused_equals_unfused():
    torch.manual_seed(0)
    models = [Decoder(PRESETS["tiny"])]
    models.append(copy.deepcopy(models[0]))
    tokens = torch.randint(512, (2, 16))
    for model, fused in zip(models, (True, False), strict=True):
        optimizer = build_optimizer(model.named_parameters(), lr=1e-2, fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            loss, count = model(tokens, labels=tokens)
            (loss / count).backward()
            optimizer.step()
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)


def steps_on_two_meshes():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4), "c": torch.nn.Linear(4, 4)}).double()
    single = copy.deepcopy(model)
    fully_shard(model["a"], mesh=mesh["tp"])
    model["b"].weight = torch.nn.Parameter(DTensor.from_local(model["b"].weight.detach().chunk(2)[mesh.get_local_rank("tp")], mesh["tp"],
                                                              [Shard(0)]))  # fmt: skip
    fully_shard(model["b"], mesh=mesh["dp"])
    optimizers = [build_optimizer(m.named_parameters(), lr=0.1) for m in (model, single)]
    for _ in range(3):
        for (_, parameter), reference in zip(model.named_parameters(), single.parameters(), strict=True):
            reference.grad = torch.randn_like(reference)
            parameter.grad = reference.grad.clone()
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                parameter.grad = distribute_tensor(reference.grad, parameter.device_mesh, parameter.placements)
        for optimizer in optimizers:
            optimizer.step()
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
    expected = {n: p.detach() for n, p in single.named_parameters()}
    return [len(group["params"]) for group in optimizers[0].param_groups], whole, expected


def test_groups_hold_one_mesh_each():
    for groups, whole, expected in run_ranks(steps_on_two_meshes, 2):
        assert sum(groups) == 6 and len(groups) == 6  # {decay, none} x {mesh of a, mesh of b, none}
        for name in whole:
            torch.testing.assert_close(whole[name], expected[name], rtol=0, atol=1e-12, msg=name)


def test_wrong_values_are_listed():
    parameter = [("w", torch.nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(ValueError) as error:
        build_optimizer(parameter, name="lion", lr=-1.0, betas=(0.9, 1.0), eps=math.nan, weight_decay=-0.1)
    for part in ("name='lion': must be 'adamw'", "lr=-1.0: must be", "betas=(0.9, 1.0)", "eps=nan", "weight_decay=-0.1"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimizer([("w", torch.nn.Parameter(torch.zeros(2), requires_grad=False))], lr=1.0)


def test_a_pattern_that_matches_nothing_is_refused():
    model = Decoder(PRESETS["tiny"])
    with pytest.raises(
        ValueError, match="lr_patterns: pattern 'embed_token' matches no trainable parameter; the nearest name is 'embed_tokens'"
    ):
        build_optimizer(model.named_parameters(), lr=1.0, lr_patterns={"embed_token": 0.1})
    with pytest.raises(ValueError, match="no_decay: pattern 'layer.*' matches no"):
        build_optimizer(model.named_parameters(), lr=1.0, no_decay=["bias", "layer.*"])
    model.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="pattern 'head'"):
        build_optimizer(model.named_parameters(), lr=1.0, lr_patterns={"head": 0.1})
    build_optimizer(model.named_parameters(), lr=1.0)  # "bias" matches nothing and is no mistake


def test_cosine():
    factor = cosine_schedule(warmup_steps=4, total_steps=24, min_ratio=0.1)
    assert [round(factor(step), 12) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factor(9) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert factor(14) == pytest.approx(0.55, abs=1e-15)
    assert factor(24) == pytest.approx(0.1, abs=1e-15) and factor(1000) == pytest.approx(0.1, abs=1e-15)
    assert all(factor(step) > factor(step + 1) for step in range(4, 24))
    assert cosine_schedule(0, 10, 0.0)(0) == 1.0


def test_wsd():
    factor = wsd_schedule(warmup_steps=4, stable_steps=6, decay_steps=10, min_ratio=0.2)
    assert [round(factor(step), 12) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert [factor(step) for step in range(4, 11)] == [1.0] * 7
    assert factor(11) == pytest.approx(0.92) and factor(15) == pytest.approx(0.6)
    assert factor(20) == pytest.approx(0.2) and factor(99) == pytest.approx(0.2)
    assert wsd_schedule(0, 2, 0, 0.5)(2) == 1.0 and wsd_schedule(0, 2, 0, 0.5)(3) == 0.5


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="total_steps=10: must exceed warmup_steps=10; train longer or warm up for less"):
        cosine_schedule(10, 10, 0.1)
    with pytest.raises(ValueError, match="warmup_steps=-1: must be an integer of at least 0"):
        cosine_schedule(-1, 10, 0.1)
    with pytest.raises(ValueError, match="decay_steps=2.5: must be an integer"):
        wsd_schedule(1, 1, 2.5, 0.1)
    with pytest.raises(ValueError, match=r"min_ratio=1.5: must be in \[0, 1\]"):
        wsd_schedule(1, 1, 2, 1.5)
    optimizer = build_optimizer([("w", torch.nn.Parameter(torch.zeros(2, 2)))], lr=1.0)
    with pytest.raises(ValueError, match="kind='linear': must be one of constant, cosine, wsd"):
        build_scheduler(optimizer, kind="linear")
    with pytest.raises(ValueError, match="cosine schedule has no argument 'warmup_step'; did you mean 'warmup_steps'?"):
        build_scheduler(optimizer, kind="cosine", warmup_step=3)
    with pytest.raises(ValueError, match="wsd schedule needs decay_steps"):
        build_scheduler(optimizer, kind="wsd", warmup_steps=3, stable_steps=3)


def test_the_scheduler_multiplies_every_group_and_resumes_on_other_groups():
    weights = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in ("a", "b")}
    make = lambda **more: build_optimizer(weights.items(), lr=1.0, **more)  # noqa: E731
    optimizer = make(lr_patterns={"b": 0.5})
    scheduler = build_scheduler(optimizer, kind="cosine", warmup_steps=4, total_steps=24, min_ratio=0.1)
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    factor = cosine_schedule(4, 24, 0.1)
    assert rates == [[factor(step), 0.5 * factor(step)] for step in range(6)]
    assert scheduler.state_dict() == {"last_epoch": 6, "_step_count": 7}
    other = make()  # one group instead of two
    resumed = build_scheduler(other, kind="cosine", warmup_steps=4, total_steps=24, min_ratio=0.1)
    resumed.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert other.param_groups[0]["lr"] == resumed.get_last_lr()[0] == factor(6)
    other.step()
    resumed.step()
    assert other.param_groups[0]["lr"] == factor(7)


def test_constant():
    optimizer = build_optimizer([("w", torch.nn.Parameter(torch.zeros(2, 2)))], lr=2.0)
    scheduler = build_scheduler(optimizer, kind="constant", warmup_steps=1)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("lr", "abc", "lr='abc': must be a finite number"),
        ("lr", None, "lr=None: must be a finite number"),
        ("betas", 0.9, "betas=0.9: must be two numbers in [0, 1), such as [0.9, 0.95]"),
        ("betas", ["a", 0.9], "betas=['a', 0.9]: must be two numbers"),
        ("no_decay", "bias", "no_decay='bias': must be a list of patterns"),
    ],
)
def test_values_of_another_type_are_named(argument, value, message):
    parameter = [("weight", torch.nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(ValueError, match=re.escape(message)):
        build_optimizer(parameter, **{"lr": 0.1, argument: value})

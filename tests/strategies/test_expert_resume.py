"""Checkpoints of mixtures of experts: saved where experts are dealt out, resumed where they are dealt out otherwise or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import parity
from tests.harness import run_ranks
from tests.strategies import test_resume as resume
from tests.strategies.test_pipeline_resume import keys_of

LAYERS = 3  # the first one dense
FSDP4 = (4, 4, dict(data_parallel_shard_size=4))


def case(axes: str, family: str = "moe-like", **choices: str) -> parity.Case:
    return parity.default_case(axes=axes, family=family, init="meta", **choices)


# Auxiliary losses, a bias and a shared expert: see parity.MIXTURE.
CASES = {
    "one": case("fsdp2"),
    "ep4": case("fsdp4", "ep4"),  # expert_shard 1
    "ep2 x shard2": case("fsdp4", "ep2", checkpointing="full"),
    "fsdp4": case("fsdp4"),
    "dp4": case("dp4"),
    "pp2": case("pp2", schedule="1F1B"),
    "pp2 x fsdp2, ep2": case("pp2 x fsdp2", "ep2", schedule="1F1B"),
    "fsdp2 x tp+sp, ep4": case("fsdp2 x tp+sp", "ep4"),
    "tp": case("tp"),  # deals whole experts out as well
}
RESUMED = {
    "one": ("ep4",),
    "ep2 x shard2": ("one", "ep4"),
    "fsdp4": ("ep4",),
    "dp4": ("ep4",),
    "pp2": ("ep4",),
    "ep4": ("one", "ep2 x shard2"),
    "pp2 x fsdp2, ep2": ("ep4",),
    "fsdp2 x tp+sp, ep4": ("ep4",),
    "tp": ("ep4",),
}
DEFAULT_TIER = ("one", "ep2 x shard2", "ep4")


@pytest.fixture(scope="module", autouse=True)
def plans() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "CASES", CASES)
        patch.setattr(parity, "layers_of", lambda _: LAYERS)
        patch.setattr(parity, "dispatcher_of", lambda _: "auto")
        axes = {"fsdp4": FSDP4, "dp4": (4, 4, dict(data_parallel_replicate_size=4))}
        patch.setattr(parity, "AXES", {**parity.AXES, **axes})
        yield


@pytest.fixture(scope="module")
def reference(plans: None) -> dict[str, Any]:
    """Six steps on one device, never interrupted."""
    return run_ranks(resume.run, 1, "one", 2, None, None, timeout=200)[0]


@pytest.fixture(scope="module")
def saved(plans: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One checkpoint after three steps under each plan that is resumed from."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: resume.save_under(name, folder) for name in sorted({source for sources in RESUMED.values() for source in sources})}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("target", [pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow) for name in RESUMED])
def test_resume_where_experts_lie_elsewhere(target: str, saved: dict[str, str], reference: dict[str, Any]) -> None:
    sources = {name: saved[name] for name in RESUMED[target]}
    results = run_ranks(resume.resume_all, resume.ranks_of(target), target, sources, timeout=300)
    seen: dict[str, set[str]] = {source: set() for source in sources}
    for result in results:
        resume.assert_continues(result, reference, target)
        for source, one in result.items():
            seen[source] |= one["buffers"].keys()
            for name, buffer in one["buffers"].items():
                assert torch.equal(buffer, reference["buffers"][name]), f"{name}, saved under {source}, resumed under {target}"
    assert all(names == reference["buffers"].keys() for names in seen.values())


def test_a_checkpoint_holds_the_tensors_of_one_device_and_what_routers_know(saved: dict[str, str], reference: dict[str, Any]) -> None:
    keys = keys_of(saved["one"])
    for name in ("ep4", "ep2 x shard2"):
        assert keys_of(saved[name]) == keys
    routers = [f"layers.{layer}.mlp.router" for layer in range(1, LAYERS)]  # the first is dense
    wanted = {f"{router}.{buffer}" for router in routers for buffer in ("expert_bias", "last_step")}
    assert wanted == {*reference["buffers"]}
    assert all(any(key.endswith(name) for key in keys) for name in wanted)
    assert all(reference["buffers"][name].abs().sum() > 0 for name in wanted)

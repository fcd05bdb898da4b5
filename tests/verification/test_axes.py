"""Names of combinations of axes: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megascale.verification.axes import parse_axes

SHORT = {
    "data_parallel_replicate_size": "dp",
    "data_parallel_shard_size": "fsdp",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "sequence_parallel": "sp",
    "pipeline_schedule": "schedule",
}


@pytest.mark.parametrize(
    ("text", "ranks", "shares", "fields"),
    [
        ("dp2", 2, 2, {"dp": 2}),
        ("fsdp2", 2, 2, {"fsdp": 2}),
        ("hsdp2x4", 8, 8, {"dp": 2, "fsdp": 4}),
        ("dp2xfsdp4", 8, 8, {"dp": 2, "fsdp": 4}),
        ("tp4", 4, 1, {"tp": 4}),
        ("fsdp2xtp2+sp", 4, 2, {"fsdp": 2, "tp": 2, "sp": True}),
        ("TP2+SPxFSDP2", 4, 2, {"fsdp": 2, "tp": 2, "sp": True}),
        ("pp2xhsdp2x2xtp2", 16, 4, {"pp": 2, "dp": 2, "fsdp": 2, "tp": 2}),
        ("pp2xfsdp2:INTERLEAVED1f1b", 4, 2, {"pp": 2, "fsdp": 2, "schedule": "Interleaved1F1B"}),
        ("cp2", 2, 1, {"cp": 2}),
        ("fsdp2xep2", 2, 2, {"fsdp": 2, "ep": 2}),
    ],
)
def test_names(text: str, ranks: int, shares: int, fields: dict[str, Any]) -> None:
    axes = parse_axes(text)
    given = {SHORT[name]: value for name, value in axes.plan.items() if value not in (1, False) or value is True}
    assert (axes.name, axes.ranks, axes.shares, given) == (text, ranks, shares, fields)
    assert axes.is_pipeline == ("pp" in fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor2", r"'tensor2' is no axis"),
        ("fdsp2", r"'fdsp2' is no axis; did you mean 'fsdp2'"),
        ("fsdp2xtpp2", r"axes=fsdp2xtpp2: 'tpp2' is no axis; did you mean 'tp2'"),
        ("tp", r"'tp' needs its number of ranks, at least 2, such as tp2"),
        ("fsdp2xtp1", r"'tp1' needs its number of ranks"),
        ("hsdp4", r"hsdp has two sizes, copies and shards: hsdp2x2"),
        ("tp2xtp2", r"tp stands twice"),
        ("fsdp2+sp", r"\+sp \(sequence parallelism\) belongs to tp"),
        ("tp2:gpipe", r"a schedule needs a pipeline, as in pp2:gpipe"),
        ("pp2:interleaved", r"'interleaved' is no schedule; did you mean 'interleaved1f1b'"),
        ("", r"is no axis"),
    ],
)
def test_names_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_axes(text)

"""What a number takes in each place under Lightning's precisions, as this package's strategy runs them."""

from __future__ import annotations

from lightning_megascale.planning.stack import Precision

# Mixed: float32 shards, used and gathered in bfloat16. True: everything in bfloat16 but sums over ranks (reduce_dtype) and the gradients
# that microbatches add up in it. Source: torch's MixedPrecisionPolicy; the dry run's bytes, which tests compare.
PRECISIONS = {
    "bf16-mixed": Precision("bf16-mixed"),
    "bf16-true": Precision("bf16-true", shard_bytes=2, gradient_bytes=2, optimizer_bytes=4),
    "32-true": Precision("32-true", "float32", compute_bytes=4, gather_bytes=4),
    "64-true": Precision("64-true", "float64", 8, 8, 8, 16, 8, 8, 8),
}
_OTHER_NAMES = {"bf16": "bf16-mixed", "32": "32-true", "None": "32-true", "64": "64-true", "float32": "32-true", "float64": "64-true"}


def precision_named(name: object) -> Precision:
    """What ``Trainer(precision=name)`` means.

    Raises:
        ValueError: for one that the planner does not know.
    """
    known = _OTHER_NAMES.get(str(name), str(name))
    if known not in PRECISIONS:
        raise ValueError(f"precision={name!r}: the planner knows {', '.join(PRECISIONS)}; choose one of these")
    return PRECISIONS[known]

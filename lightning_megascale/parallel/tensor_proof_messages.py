"""What the numeric proof of tensor parallelism says when a split block gives other numbers: where they differ, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = {
    "output": (
        "Likely causes:\n"
        "- inside attention or mlp an operation goes over the heads or features, of which a rank has a part: a norm, softmax, top-k or "
        "mean over them; chunk or split of a fused projection (use one linear per projection); a table per head that is sliced "
        "(slopes[:n]); key/value heads repeated by tiling (use repeat_interleave, or enable_gqa)\n"
        "- dropout is drawn inside attention or mlp (F.dropout, dropout_p=): set it to 0 there, or use nn.Dropout behind the row-parallel "
        "linear\n"
        "- a linear has the wrong role in the layout: colwise and rowwise must alternate, one rowwise linear after the colwise ones"
    ),
    "hidden": (
        "Likely causes:\n"
        "- the module that works on a part of the heads or features is not listed in layout.attention or layout.mlp\n"
        "- inside attention or mlp the input reaches the output around the row-parallel linear (a residual, a gate): its gradient is then "
        "counted once per rank; do it outside of the module\n"
        "- an output besides the row-parallel linear's own depends on this rank's heads only (attention weights, a statistic)"
    ),
    "second": (
        "Likely cause: attention or mlp uses it together with a part of the heads or features, and only the gradient of the module's FIRST "
        "argument is summed over the ranks; this one stays a partial sum. Combine it with the hidden state before the module, or detach it"
    ),
    "parameter": (
        "Likely causes:\n"
        "- it works on a part of the heads or features and is not listed in layout.replicated (whole on every rank, gradients summed), "
        "which also needs its attention or mlp module listed in layout.attention or layout.mlp\n"
        "- it is listed in layout.replicated but works behind the row-parallel linear, where its gradient is whole and would be counted "
        "once per rank: move it out of the attention or mlp module\n"
        "- its attention or mlp module also returns something that depends on this rank's heads only"
    ),
}

_SEQUENCE = (
    "Likely causes:\n"
    "- under sequence_parallel the block outside of attention and mlp sees a part of the positions: what mixes positions there (a shift, "
    "cumsum, mean or convolution over the sequence) or draws by itself (F.dropout: use nn.Dropout) is wrong; do it inside of the attention "
    "or mlp module, or set sequence_parallel=False\n"
)


@dataclass(frozen=True)
class Called:
    """A kind of block as messages call it.

    Args:
        name, type: of the first block of the kind.
        count: blocks of the kind.
        size: of the tensor-parallel axis.
        sequence: sequence parallelism.
    """

    name: str
    type: str
    count: int
    size: int
    sequence: bool

    def __str__(self) -> str:
        others = f" and {self.count - 1} more like it" if self.count > 1 else ""
        return f"{self.name or 'the model'} ({self.type}){others}"

    @property
    def plan(self) -> str:
        return f"tensor_parallel_size={self.size}" + (" with sequence_parallel" if self.sequence else "")

    def _why(self, causes: str) -> str:
        return _SEQUENCE + CAUSES[causes].removeprefix("Likely causes:\n") if self.sequence and causes != "second" else CAUSES[causes]

    def no_copy(self, error: BaseException | None) -> ValueError:
        return ValueError(
            f"{self}: the numeric proof of tensor parallelism cannot run its copy, unsplit, with drawn weights and the inputs of the first "
            f"call: {type(error).__name__}: {error}. A block must compute what its arguments, parameters and buffers say"
        )

    def no_split(self, error: BaseException | None) -> ValueError:
        return ValueError(
            f"{self}: runs on one device, but not under {self.plan}: {type(error).__name__}: {error}. Read every size from a projected "
            f"tensor, never from a setting of the whole layer.\n{self._why('output')}"
        )

    def other_shapes(self, wanted: list[tuple[int, ...]], got: list[tuple[int, ...]]) -> ValueError:
        shapes = [", ".join(map(str, found)) or "none" for found in (got, wanted)]
        return ValueError(
            f"{self}: under {self.plan} its floating outputs have the shapes {shapes[0]}; on one device {shapes[1]}.\n{self._why('output')}"
        )

    def differs(self, what: str, causes: str, error: float) -> ValueError:
        """Args:
        what: the output or gradient that differs.
        causes: key of CAUSES.
        error: relative to its size.
        """
        return ValueError(
            f"{self}: under {self.plan} it does not compute what it computes on one device: {what} is off by {error:.1e} of its size "
            f"(numeric proof at the first training call, with drawn weights; nothing was trained).\n{self._why(causes)}"
        )

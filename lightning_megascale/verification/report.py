"""What a verification says: one Report for each combination of axes, and the errors that keep it from saying anything."""

from __future__ import annotations

from dataclasses import dataclass


class CannotVerify(ValueError):
    """The model, its batches or the arguments do not allow a proof; the message says what to change."""


class Refused(ValueError):
    """The strategy refused the combination on this model; the message is its reason."""


@dataclass(frozen=True)
class Report:
    """How far the numbers of one combination are from one device's.

    Args:
        axes: the combination, as it was asked for.
        ok: every number is equal within the tolerance.
        refused: why the strategy refused the combination, or None.
        error: the traceback of ranks that failed, or which ranks hung and where; None when all of them trained.
        loss: largest difference of a step's loss, relative to the loss where it is above 1.
        gradient: largest difference of an element of a gradient before an optimizer step, relative to the norm of all gradients of that
            step, and the name of its parameter.
        norm: largest relative difference of the norm before clipping; None where nothing clips (manual optimization).
        parameters: largest difference of an element of a parameter after the last step, and its name.
        first_divergence: the first module whose numbers differ, with what differs; None when all are equal.
        hint: what that usually means.
        seconds: wall time of the ranks.
    """

    axes: str
    ok: bool
    refused: str | None = None
    error: str | None = None
    loss: float | None = None
    gradient: tuple[float, str] | None = None
    norm: float | None = None
    parameters: tuple[float, str] | None = None
    first_divergence: str | None = None
    hint: str | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """One word: equal, refused, FAILED (the ranks did not train to the end) or DIFFERENT."""
        if self.ok:
            return "equal"
        return "refused" if self.refused else "FAILED" if self.error else "DIFFERENT"

    def __str__(self) -> str:
        parts = [f"{self.axes}: {self.verdict}"]
        if self.gradient is not None and self.parameters is not None:
            parts.append(
                f"loss {self.loss:.1e}, gradient {self.gradient[0]:.1e} ({self.gradient[1]}), "
                f"parameters {self.parameters[0]:.1e} ({self.parameters[1]})"
            )
        parts += [text for text in (self.first_divergence, self.hint, self.refused, self.error) if text]
        return "\n".join(parts)

"""Figures of one optimizer step of one rank, from a recorder around it and from the tensors that it leaves."""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_megascale.mesh import MeshViews
from lightning_megascale.verification.dryrun.fakes import axes_of
from lightning_megascale.verification.dryrun.rank import Step, Watch, build, local
from lightning_megascale.verification.dryrun.recorder import Recorder
from lightning_megascale.verification.dryrun.subject import Subject


class Model:
    """A rank's model with the state of its optimizer, ready to be measured with any number of microbatches."""

    def __init__(self, subject: Subject, views: MeshViews) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.rank = build(subject, views, self.fake)
        meshes = [views.root, views.data, views.batch, views.loss, views.context_ring, views.context_heads]
        meshes += [parameter.device_mesh for parameter in self.rank.parameters if hasattr(parameter, "device_mesh")]
        self.axes = axes_of([mesh for mesh in meshes if mesh is not None], self.rank.module)
        with self.fake:  # the state of the optimizer is there from the first step on
            for parameter in self.rank.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.rank.optimizer.step()
            self.rank.optimizer.zero_grad()

    def measure(self, microbatches: int) -> tuple[dict[Hashable, int], Watch]:
        """Of one step; what was done in which order."""
        with self.fake:
            step = Step(self.rank, microbatches)
            recorder = Recorder(self.axes, self._grouped_rows())
            for tensor in [*self.rank.parameters, *self._state(), *(t for batch in step.batches for t in batch.values())]:
                recorder.adopt(local(tensor))
            with recorder:
                step.run()
            figures = self._held() | self._passed(recorder) | {"in_flight": step.watch.most}
            self.rank.optimizer.zero_grad()
        return figures, step.watch

    def _grouped_rows(self) -> Fraction:
        """Tensor parallelism alone deals experts out over ranks that all have all tokens: most rows of a product are no expert's."""
        plan = self.rank.subject.plan
        dealt = plan.expert_parallel_size == 1 and not plan.sequence_parallel
        return Fraction(1, plan.tensor_parallel_size if dealt else 1)

    def _state(self) -> list[Tensor]:
        states = self.rank.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def _held(self) -> dict[Hashable, int]:
        rank = self.rank
        gradients = [local(parameter.grad) for parameter in rank.parameters if parameter.grad is not None]
        return {
            "parameters": sum(parameter.numel() for parameter in rank.parameters if id(parameter) not in rank.done.copies),
            "parameters_bytes": storage_bytes([local(parameter) for parameter in rank.parameters]),
            "gradient_bytes": storage_bytes(gradients),
            "optimizer_bytes": storage_bytes([local(value) for value in self._state()]),
        }

    def _passed(self, recorder: Recorder) -> dict[Hashable, int]:
        found: dict[Hashable, int] = {
            "flops": recorder.flops["forward"] + recorder.flops["backward"],
            "recomputed_flops": recorder.flops["recomputed"],
            "peak_bytes": recorder.peak,
        }
        for key, (calls, bytes_) in recorder.traffic.items():
            found[(*key, "calls")], found[(*key, "bytes")] = calls, bytes_
        return found


def storage_bytes(tensors: list[Any]) -> int:
    """Of the storages under tensors, each once: FSDP2's gradients of one unit are views of one buffer."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())

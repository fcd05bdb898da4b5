"""Data sheets of GPUs: peak arithmetic, memory and the link to their neighbours in a node; every figure with its source."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Gpu:
    """One GPU's data sheet.

    Args:
        name: its name in configs, such as "h100".
        peak_tflops: dense peak by dtype, 1e12 operations per second; sparsity is never counted. Matrix units where the dtype has them.
        memory_gib: what CUDA reports as total memory, in units of 2**30 bytes.
        memory_tb_per_s: bandwidth of that memory, 1e12 bytes per second.
        multiprocessors: streaming multiprocessors; tiles are dealt to them in waves.
        scale_up_gb_per_s: to the other GPUs of its NVLink domain, one direction, 1e9 bytes per second.
        source: where the figures come from.
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_tb_per_s: float
    multiprocessors: int
    scale_up_gb_per_s: float
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_tflops", MappingProxyType(dict(self.peak_tflops)))
        for field in ("memory_gib", "memory_tb_per_s", "multiprocessors", "scale_up_gb_per_s"):
            check_positive(f"gpu {self.name}: {field}", getattr(self, field))
        for dtype, peak in self.peak_tflops.items():
            check_positive(f"gpu {self.name}: peak_tflops[{dtype!r}]", peak)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak of ``dtype`` (torch's name), operations per second.

        Raises:
            ValueError: the sheet holds no such dtype.
        """
        if dtype not in self.peak_tflops:
            raise ValueError(
                f"dtype={dtype!r}: {self.name} has no peak for it; choose one of {', '.join(self.peak_tflops)} or add it to peak_tflops"
            )
        return self.peak_tflops[dtype] * 1e12


def check_positive(name: str, value: object) -> None:
    """Refuse what is no number above zero, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r}: must be a number above 0; give the figure of the data sheet or a measured one")
    if not 0 < value <= sys.float_info.max:  # an int may be larger than any float
        raise ValueError(f"{name}={value!r}: must be above 0 and finite; give the figure of the data sheet or a measured one")


def _peaks(bfloat16: float, float32: float, float64: float, *, tf32: float, **more: float) -> dict[str, float]:
    """Peaks by torch's names: float16 runs at bfloat16's rate on every GPU here."""
    return {"bfloat16": bfloat16, "float16": bfloat16, "tf32": tf32, "float32": float32, "float64": float64, **more}


_A100 = _peaks(312, 19.5, 19.5, tf32=156, int8=624)
_H100 = _peaks(989.4, 66.9, 66.9, tf32=494.7, float8=1978.9, int8=1978.9)
_H800 = _peaks(989.4, 66.9, 1.0, tf32=494.7, float8=1978.9, int8=1978.9)
_B200 = _peaks(2250, 75, 37, tf32=1125, float8=4500, int8=4500, float4=9000)
_GB200 = _peaks(2500, 80, 40, tf32=1250, float8=5000, int8=5000, float4=10000)

_B300 = _peaks(2250, 75, 1.25, tf32=1125, float8=4500, int8=140, float4=13500)
_GB300 = _peaks(2500, 80, 1.39, tf32=1250, float8=5000, int8=156, float4=15000)

_SHEETS = (
    Gpu("a100_40gb", _A100, 39.4, 1.555, 108, 300, "NVIDIA A100 data sheet (SXM4 40 GB); memory as reported by CUDA"),
    Gpu("a100", _A100, 79.15, 2.039, 108, 300, "NVIDIA A100 data sheet (SXM4 80 GB); memory as reported by CUDA"),
    Gpu("h100", _H100, 79.1, 3.35, 132, 450, "NVIDIA H100 architecture white paper, table 2 (SXM5); memory as reported by CUDA"),
    Gpu(
        "h800",
        _H800,
        79.1,
        3.35,
        132,
        200,
        "an H100 with NVLink cut to 400 GB/s over both directions and little float64; DeepSeek-V3 (3.2.2) gets 160",
    ),
    Gpu("h200", _H100, 139.8, 4.8, 132, 450, "NVIDIA H200 data sheet (SXM); memory as reported by CUDA"),
    Gpu(
        "h100_96gb",
        _H100,
        95.0,
        2.4,
        132,
        450,
        "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e, 2.4 TB/s, 500 W, under which products reach less "
        "of an H100's peak; memory: as torchtitan reports it, estimated",
    ),
    Gpu("b200", _B200, 178.35, 7.67, 148, 900, "NVIDIA HGX B200 data sheet; memory, bandwidth, SMs: device query in pytorch/ao pull 4002"),
    Gpu("gb200", _GB200, 184.0, 8.0, 152, 900, "NVIDIA GB200 NVL72 data sheet, a 72nd; memory: 186 GB less a driver's share, estimated"),
    Gpu("b300", _B300, 268.6, 8.0, 148, 900, "NVIDIA HGX B300 data sheet, an eighth; memory as reported by CUDA, SMs as b200: estimated"),
    Gpu("gb300", _GB300, 277.5, 8.0, 152, 900, "NVIDIA GB300 NVL72 data sheet, a 72nd; memory: 288 GB less a share, SMs: estimated"),
    Gpu(
        "cpu",
        {"float32": 0.05, "float64": 0.025, "bfloat16": 0.05},
        8,
        0.01,
        1,
        2,
        "an assumed laptop core under gloo: orders of magnitude, to be replaced by measured figures",
    ),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({sheet.name: sheet for sheet in _SHEETS})


def gpu_sheet(name: str) -> Gpu:
    """The sheet called ``name``; case and a hyphen for an underscore do not matter.

    Raises:
        ValueError: there is none; the nearest name is said.
    """
    key = str(name).lower().replace("-", "_")
    if key in GPUS:
        return GPUS[key]
    near = difflib.get_close_matches(key, GPUS, 1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "give a Gpu of your own instead"
    raise ValueError(f"gpu={name!r}: must be one of {', '.join(GPUS)}; {hint}")

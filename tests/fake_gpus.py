"""GPUs and packages that are not there, as NVML and the installed metadata would tell of them."""

from __future__ import annotations

from harness.nvml import GpuDevice

INSTALLED = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}


def device(index: int = 0, capability: tuple[int, int] = (9, 0)) -> GpuDevice:
    """An H100 with a gibibyte in use, or something of another compute capability."""
    return GpuDevice(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        compute_capability=capability,
        total_bytes=80 << 30,
        free_bytes=79 << 30,
        used_bytes=1 << 30,
        driver_version="580.95.05",
        cuda_version=(13, 0),
    )

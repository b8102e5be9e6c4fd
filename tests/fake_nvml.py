"""A driver that is not there: what NVML would answer on a machine with given GPUs, behind the functions of `pynvml`.

Imported by several tests (pyproject.toml puts this folder on their path).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 1 << 30


@dataclass(eq=False, kw_only=True)
class FakeGpu:
    """A GPU, or an instance of one. `instances` is None where it is not in MIG mode; None in it is a gap."""

    name: str
    compute_capability: tuple[int, int]
    uuid: str
    total: int = 80 * GIB
    used: int = 1 * GIB
    has_mig: bool = True
    instances: list[FakeGpu | None] | None = None


@dataclass(kw_only=True)
class FakeNvml:
    """The part of `pynvml` that is used; errors and constants are the real ones."""

    gpus: list[FakeGpu]
    driver: str = "580.95.05"
    cuda: int = 13000
    init_error: int | None = None
    libcuda: bool = True
    num_sessions: int = field(default=0, init=False)

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.num_sessions += 1

    def nvmlShutdown(self) -> None:
        self.num_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if not self.libcuda:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=handle.total, used=handle.used, free=handle.total - handle.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        if handle not in self.gpus:  # an instance has none of its own
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return handle.compute_capability

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if not device.has_mig:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return len(device.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeGpu:
        instance = (device.instances or [])[index]
        if instance is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return instance


def a100(number: int) -> FakeGpu:
    return FakeGpu(name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), uuid=f"GPU-a{number}00-1111")


def h100(number: int) -> FakeGpu:
    return FakeGpu(name="NVIDIA H100 80GB HBM3", compute_capability=(9, 0), uuid=f"GPU-b{number}00-2222")


def a100_in_mig_mode(*instances: str | None) -> FakeGpu:
    """With an instance of 10 GiB for each given UUID."""
    gpu = a100(7)
    gpu.instances = [
        None
        if uuid is None
        else FakeGpu(name=f"{gpu.name} MIG 1g.10gb", compute_capability=(8, 0), uuid=uuid, total=10 * GIB, used=0)
        for uuid in instances
    ]
    return gpu


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, visible: str | None = None, **options: Any) -> FakeNvml:
    """Makes these the GPUs of the machine, with `CUDA_VISIBLE_DEVICES` set to `visible`."""
    nvml = FakeNvml(gpus=list(gpus), **options)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return nvml

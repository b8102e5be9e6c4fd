"""`harness-build doctor`: what this machine has of what an arch needs, and what to do about the rest.

Owns the checks, not the table of versions (`tensorrt_llm/versions.py`), nor which device fits which arch
(`harness.arch`). It looks at metadata, the driver, PATH and sizes: nothing heavy is imported, nothing is run. How much
memory a model needs is the ledger's to say, so that memory and disk only warn.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from harness.arch import CPU, Arch, arch_of, check_device, native_arch, resolve_arch
from harness.build.tensorrt_llm.versions import (
    BUILDER,
    MIN_CUDA,
    MIN_DRIVER,
    PYTHON_VERSIONS,
    REQUIREMENTS,
    installed,
    is_supported_python,
    satisfies,
)
from harness.errors import DeviceError, NoDeviceError
from harness.ledger import GIB, gib
from harness.machine import available_memory_bytes, num_usable_cores
from harness.nvml import GpuDevice, devices

_DISTRIBUTION = "deepseek-harness-engine"
_ENVIRONMENT = (
    "use an environment with TensorRT-LLM 1.2.1: NVIDIA's container tensorrt-llm/release:1.2.1, or pip (docs/gpu.md)"
)
_BUSY_SHARE = 0.1
_CPU_MEMORY, _CPU_DISK = 4 * GIB, 10 * GIB
_GPU_MEMORY, _GPU_DISK = 16 * GIB, 50 * GIB  # a model of 7B in 16 bits: once in memory, three times on disk


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    Attributes:
        target: the arch it was made for; `gpu` for whatever GPU is there.
        status: `fail` where building or running cannot work, `warn` where it may not.
        action: what to do; empty where all is well.
    """

    target: str
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    needed: str
    action: str = ""


def examine(arch_name: str | None) -> list[Check]:
    """Check this machine for an arch, by default for `cpu` and whatever GPU is there.

    Raises:
        UsageError: there is no such arch.
        DeviceError: the arch is `native` and there is no GPU that has one.
    """
    if arch_name == "native":
        return list(_gpu(native_arch(devices())))
    if arch_name is not None:
        arch = resolve_arch(arch_name)
        return list(_gpu(arch) if arch.is_gpu else _cpu())
    return [*_cpu(), *_gpu(None)]


def _judge(
    target: str,
    name: str,
    fine: bool,
    found: str,
    needed: str,
    action: str,
    otherwise: Literal["warn", "fail"] = "fail",
) -> Check:
    status: Literal["ok", "warn", "fail"] = "ok" if fine else otherwise
    return Check(target=target, name=name, status=status, found=found, needed=needed, action="" if fine else action)


def _cpu() -> Iterator[Check]:
    pinned = {need.name: str(need.specifier) for need in map(Requirement, requires(_DISTRIBUTION) or ())}
    yield _package(CPU.name, "openvino", pinned["openvino"], f"pip install 'openvino{pinned['openvino']}'")
    yield _judge(CPU.name, "cores", True, f"{num_usable_cores()}, {platform.machine()}", "any number", "")
    yield from _sizes(CPU.name, _CPU_MEMORY, _CPU_DISK)


def _gpu(arch: Arch | None) -> Iterator[Check]:
    """Lines of a GPU arch; None asks what is there, and nothing more is needed where that is nothing we build for."""
    target = "gpu" if arch is None else arch.name
    try:
        found = devices()
    except DeviceError as error:
        found = []
        yield _no_device(target, arch, error)
    for device in found:
        yield from _device(target, arch, device)
    if arch is None and not any(arch_of(device.compute_capability) for device in found):
        return
    if found:
        yield from _driver(target, found[0])
    needed = " or ".join(PYTHON_VERSIONS)
    yield _judge(target, "Python", is_supported_python(), platform.python_version(), needed, _ENVIRONMENT)
    for package, specifier in REQUIREMENTS.items():
        yield _package(target, package, specifier, _ENVIRONMENT)
    builder = shutil.which(BUILDER)
    yield _judge(target, BUILDER, builder is not None, builder or "not on PATH", "on PATH", _ENVIRONMENT)
    launcher = shutil.which("mpirun")
    advice = "install Open MPI: apt-get install openmpi-bin libopenmpi-dev"
    yield _judge(
        target, "mpirun", launcher is not None, launcher or "not on PATH", "for more than one GPU", advice, "warn"
    )
    yield from _sizes(target, _GPU_MEMORY, _GPU_DISK)


def _no_device(target: str, arch: Arch | None, error: DeviceError) -> Check:
    if arch is not None:
        needed = f"a GPU of {arch.describe()}"
        return _judge(target, "device", False, error.message, needed, error.hint)
    return _judge(
        target, "device", isinstance(error, NoDeviceError), error.message, "one for sm_* alone", error.hint, "warn"
    )


def _device(target: str, arch: Arch | None, device: GpuDevice) -> Iterator[Check]:
    name, known = f"device {device.index}", arch_of(device.compute_capability)
    major, minor = device.compute_capability
    found = f"{device.name}, sm_{major}{minor}{', a MIG instance' if device.is_mig else ''}"
    if arch is not None and arch is not known:
        yield _judge(target, name, False, found, arch.describe(), _mismatch(arch, device))
        return
    needed = "an arch of this version, without limits"
    action = "it cannot be built for" if known is None else known.caveat
    yield _judge(target, name, not action, found, needed, action, "warn")
    yield _judge(
        target,
        f"{name}, memory",
        device.used_bytes <= _BUSY_SHARE * device.total_bytes,
        f"{gib(device.free_bytes)} free of {gib(device.total_bytes)}",
        "no other process on it",
        "see with nvidia-smi what uses it: weights and KV cache share what is free",
        "warn",
    )


def _mismatch(arch: Arch, device: GpuDevice) -> str:
    try:
        check_device(arch, [device])
    except DeviceError as error:
        return f"{error.hint}; or hide the device with CUDA_VISIBLE_DEVICES"
    return ""


def _driver(target: str, device: GpuDevice) -> Iterator[Check]:
    runs_cuda = device.cuda_version >= MIN_CUDA
    advice = f"install driver {MIN_DRIVER} or newer, or on a data centre card the package cuda-compat-13-1"
    branch = device.driver_version.partition(".")[0]
    recent = branch.isdecimal() and int(branch) >= MIN_DRIVER
    yield _judge(
        target, "driver", recent, device.driver_version, f">={MIN_DRIVER}", advice, "warn" if runs_cuda else "fail"
    )
    shown, needed = (".".join(map(str, pair)) for pair in (device.cuda_version, MIN_CUDA))
    yield _judge(target, "CUDA of the driver", runs_cuda, shown, f">={needed}", advice)


def _package(target: str, package: str, specifier: str, advice: str) -> Check:
    version = installed(package)
    needed = specifier or "any version"
    return _judge(target, package, satisfies(version, specifier), version or "not installed", needed, advice)


def _sizes(target: str, memory: int, disk: int) -> Iterator[Check]:
    free = available_memory_bytes()
    advice = "close what uses memory, or take a larger machine; a small model may still fit"
    yield _judge(target, "host memory", free >= memory, f"{gib(free)} free", f"about {gib(memory)}", advice, "warn")
    free = shutil.disk_usage(Path.cwd()).free
    advice = "make room, or start elsewhere: engines are written to ./engines; a small model may still fit"
    yield _judge(target, "disk", free >= disk, f"{gib(free)} free", f"about {gib(disk)}", advice, "warn")

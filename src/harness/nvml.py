"""The NVIDIA devices that CUDA would show to this process, asked of the driver alone.

It reads through NVML (nvidia-ml-py), which creates no CUDA context, takes no GPU memory and needs no CUDA toolkit. It
owns no policy: `harness.arch` decides what fits. Which devices are visible follows `CUDA_VISIBLE_DEVICES` (CUDA
Programming Guide, appendix on environment variables). Of a GPU in MIG mode CUDA shows instances, not the whole: the
one that is named by its UUID, otherwise the first (MIG User Guide).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from harness.errors import DeviceError, NoDeviceError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_IN_A_CONTAINER = "in a container, start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
_DRIVER_IS_NEEDED = f"install NVIDIA's driver, and see that nvidia-smi lists the GPU; {_IN_A_CONTAINER}"


@dataclass(frozen=True, kw_only=True)
class GpuDevice:
    """A visible device as it is now.

    Attributes:
        index: among the visible devices.
        uuid: `GPU-...`, or `MIG-...` of an instance; `CUDA_VISIBLE_DEVICES` takes it.
        compute_capability: `(9, 0)` of an H100.
        driver_version: of the kernel module, such as `580.95.05`.
        cuda_version: the newest CUDA that the driver's libcuda runs, `(13, 0)`; compatibility packages raise it.
        is_mig: whether it is an instance of a GPU in MIG mode, whose memory and cores are a part of the GPU's.
    """

    index: int
    uuid: str
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    used_bytes: int
    driver_version: str
    cuda_version: tuple[int, int]
    is_mig: bool = False


def devices() -> list[GpuDevice]:
    """The visible devices, in the order of `CUDA_VISIBLE_DEVICES`; at least one.

    Raises:
        NoDeviceError: there is no driver, no device, or none that is visible.
        DeviceError: the driver does not answer, or `CUDA_VISIBLE_DEVICES` does not say which devices are meant.
    """
    with _session() as nvml:
        driver_version, cuda_version = nvml.nvmlSystemGetDriverVersion(), _cuda_version(nvml)
        found = []
        for index, (handle, parent) in enumerate(_visible(nvml)):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                GpuDevice(
                    index=index,
                    uuid=nvml.nvmlDeviceGetUUID(handle),
                    name=nvml.nvmlDeviceGetName(handle),
                    compute_capability=nvml.nvmlDeviceGetCudaComputeCapability(parent),
                    total_bytes=memory.total,
                    free_bytes=memory.free,
                    used_bytes=memory.used,
                    driver_version=driver_version,
                    cuda_version=cuda_version,
                    is_mig=handle is not parent,
                )
            )
        return found


@contextmanager
def _session() -> Iterator[Any]:
    """The module `pynvml`, initialized; every error of its own becomes one of ours."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        raise NoDeviceError(f"there is no NVIDIA driver here ({error})", _DRIVER_IS_NEEDED) from error
    except pynvml.NVMLError as error:
        raise _unusable(error) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _unusable(error) from error
    finally:
        with suppress(pynvml.NVMLError):  # a lost GPU was told of already
            pynvml.nvmlShutdown()


def _unusable(error: Exception) -> DeviceError:
    return DeviceError(
        f"NVIDIA's driver does not answer ({error})",
        "see what nvidia-smi says; after an update of the driver, load the new one or start the machine again",
    )


def _cuda_version(nvml: Any) -> tuple[int, int]:
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError_LibraryNotFound as error:
        raise DeviceError("the driver's libcuda.so.1 cannot be loaded", _IN_A_CONTAINER) from error
    return number // 1000, number % 1000 // 10


def _visible(nvml: Any) -> list[tuple[Any, Any]]:
    """Handles of the visible devices, each with that of the GPU which it is, or is an instance of."""
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not gpus:
        raise NoDeviceError("NVIDIA's driver sees no GPU", _DRIVER_IS_NEEDED)
    wanted = os.environ.get(_VISIBLE)
    chosen = _every(nvml, gpus) if wanted is None else _choose(nvml, gpus, wanted)
    if not chosen and wanted is None:
        raise NoDeviceError("every GPU is in MIG mode and has no instance", "create one with nvidia-smi mig")
    if not chosen:
        named = ",".join(nvml.nvmlDeviceGetUUID(gpu) for gpu in gpus)
        raise NoDeviceError(f"{_VISIBLE}={wanted!r} shows no GPU", f"unset it, or choose of {named}")
    if len(chosen) > 1 and any(handle is not gpu for handle, gpu in chosen):
        names = ", ".join(nvml.nvmlDeviceGetUUID(handle) for handle, _ in chosen)
        raise DeviceError(
            f"a process can use one MIG instance, but {len(chosen)} devices are visible: {names}",
            f"make one of them visible with {_VISIBLE}",
        )
    return chosen


def _choose(nvml: Any, gpus: list[Any], wanted: str) -> list[tuple[Any, Any]]:
    """As CUDA does: the first name that fits no device, or several, ends the list; a device named twice empties it."""
    chosen: list[tuple[Any, Any]] = []
    for name in (part.strip() for part in wanted.split(",")):
        if re.fullmatch("[0-9]{1,9}", name):
            _refuse_unknown_order(nvml, gpus)
            fitting = _every(nvml, gpus[int(name) : int(name) + 1])
        else:
            fitting = [(handle, gpu) for gpu in gpus for handle in _named(nvml, gpu, name)]
        if len(fitting) != 1:
            break
        if fitting[0] in chosen:
            return []
        chosen += fitting
    return chosen


def _every(nvml: Any, gpus: list[Any]) -> list[tuple[Any, Any]]:
    return [(handle, gpu) for gpu in gpus for handle in _usable(nvml, gpu)[:1]]


def _named(nvml: Any, gpu: Any, name: str) -> list[Any]:
    """What CUDA would use of a GPU for a UUID or the beginning of one."""
    if name.startswith("GPU-"):
        return _usable(nvml, gpu)[:1] if nvml.nvmlDeviceGetUUID(gpu).startswith(name) else []
    if name.startswith("MIG-"):
        return [handle for handle in _usable(nvml, gpu) if nvml.nvmlDeviceGetUUID(handle).startswith(name)]
    return []


def _usable(nvml: Any, gpu: Any) -> list[Any]:
    """The GPU itself, or its instances when it is in MIG mode."""
    try:
        current_mode, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError_NotSupported:
        return [gpu]
    if current_mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return [gpu]
    instances = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(nvml.NVMLError_NotFound):  # indices have gaps
            instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
    return instances


def _refuse_unknown_order(nvml: Any, gpus: list[Any]) -> None:
    """CUDA counts the fastest GPU first, NVML by PCI bus: among different ones an index may mean two devices."""
    names = {nvml.nvmlDeviceGetName(gpu) for gpu in gpus}
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise DeviceError(
            f"{_VISIBLE} counts devices, but the GPUs here differ ({', '.join(sorted(names))}) and CUDA may count them "
            "in another order than nvidia-smi",
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by UUID as nvidia-smi -L lists them",
        )

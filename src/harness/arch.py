"""The arch table: what an engine can be built for, and what each target can run.

`cpu` is lowered to OpenVINO and runs anywhere. The NVIDIA archs are named by compute capability and lowered to
TensorRT-LLM. What they can run is what the engine builder of TensorRT-LLM 1.2.1 accepts (docs/gpu.md). Which card has
which compute capability: NVIDIA's table at developer.nvidia.com/cuda-gpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from harness.nvml import GpuDevice


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A build target.

    Attributes:
        name: on the command line.
        backend: the library that runs its engines.
        cards: names of cards of this arch, for people; none for `cpu`.
        compute_capability: of NVIDIA's devices; None for `cpu`.
        integers: whether int4 and int8 weights and an int8 KV cache can be built.
        latent_attention: whether MLA (arXiv 2405.04434) can be run.
        caveat: what to know before one builds for it; empty where there is nothing.
    """

    name: str
    backend: str
    cards: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    integers: bool = True
    latent_attention: bool = True
    caveat: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it is one of NVIDIA's."""
        return self.compute_capability is not None

    def describe(self) -> str:
        """The arch with some of its cards: `sm_80 (A100, A800, A30)`."""
        return f"{self.name} ({', '.join(self.cards)})" if self.cards else self.name


def _gpu(
    major: int, minor: int, *cards: str, integers: bool = True, latent_attention: bool = False, caveat: str = ""
) -> Arch:
    return Arch(
        name=f"sm_{major}{minor}",
        backend="tensorrt-llm",
        cards=cards,
        compute_capability=(major, minor),
        integers=integers,
        latent_attention=latent_attention,
        caveat=caveat,
    )


CPU = Arch(name="cpu", backend="openvino")
_SIXTEEN_BIT = "TensorRT-LLM 1.2.1 builds engines of 16-bit weights and KV alone for it"
_UNPROVEN = "unproven: TensorRT-LLM 1.2.1 is compiled for it and refuses no precision, but no engine is known to run"
ARCHS = {
    arch.name: arch
    for arch in (
        CPU,
        _gpu(8, 0, "A100", "A800", "A30"),
        _gpu(8, 6, "A10", "A40", "A16", "A2", "RTX A6000", "GeForce RTX 30 series"),
        _gpu(8, 9, "L4", "L40", "L40S", "L20", "RTX 6000 Ada", "GeForce RTX 40 series"),
        _gpu(9, 0, "H100", "H200", "H800", "H20", "GH200", latent_attention=True),
        _gpu(10, 0, "B200", "GB200", integers=False, caveat=_SIXTEEN_BIT),
        _gpu(10, 3, "B300", "GB300", integers=False, caveat=_SIXTEEN_BIT),
        _gpu(12, 0, "RTX PRO 6000 Blackwell", "GeForce RTX 50 series", caveat=_UNPROVEN),
    )
}


def resolve_arch(name: str) -> Arch:
    """Look up an arch by its name on the command line.

    Raises:
        UsageError: there is no such arch.
    """
    if name not in ARCHS:
        raise UsageError(
            f"unknown arch {name!r}", f"allowed: {', '.join(ARCHS)}, or native for the GPU of this machine"
        )
    return ARCHS[name]


def arch_of(compute_capability: tuple[int, int]) -> Arch | None:
    """The arch of a device; None where this version knows none."""
    return next((arch for arch in ARCHS.values() if arch.compute_capability == compute_capability), None)


def native_arch(devices: Sequence[GpuDevice]) -> Arch:
    """The arch of the visible devices, `--arch native`.

    Args:
        devices: all visible ones, at least one, as `harness.nvml.devices` gives them.

    Raises:
        DeviceError: they are of several archs, or of one that is not built for.
    """
    first = devices[0]
    if any(device.compute_capability != first.compute_capability for device in devices):
        raise DeviceError(
            f"the visible devices are not of one arch: {'; '.join(map(_describe, devices))}",
            "name one with --arch, and make only its devices visible with CUDA_VISIBLE_DEVICES",
        )
    arch = arch_of(first.compute_capability)
    if arch is None:
        raise DeviceError(f"{_describe(first)}, which this version does not build for", _offered())
    return arch


def check_device(arch: Arch, devices: Sequence[GpuDevice], *, built: bool = False) -> None:
    """Refuse devices that cannot build or run an engine for `arch`: an engine is bound to one compute capability.

    Args:
        arch: one of NVIDIA's.
        devices: all visible ones; CUDA may number those of several archs in another order than NVML does.
        built: whether an engine is there already, and is about to be loaded.

    Raises:
        DeviceError: one of them is of another arch. The message names both sides, the hint the arch to give.
    """
    wrong = [device for device in devices if device.compute_capability != arch.compute_capability]
    if not wrong:
        return
    wanted = f"the engine was built for {arch.describe()}" if built else f"--arch {arch.describe()}"
    right = [device.uuid for device in devices if device not in wrong]
    other = arch_of(wrong[0].compute_capability)
    if right:
        hint = f"make only devices of {arch.name} visible: CUDA_VISIBLE_DEVICES={','.join(right)}"
    elif other is not None:
        hint = f"{'rebuild' if built else 'build'} with --arch {other.name}"
    else:
        hint = _offered()
    raise DeviceError(f"{wanted}, but {_describe(wrong[0])}", hint)


def _describe(device: GpuDevice) -> str:
    major, minor = device.compute_capability
    return f"device {device.index} is {device.name}, sm_{major}{minor}"


def _offered() -> str:
    return f"GPU archs of this version: {', '.join(arch.describe() for arch in ARCHS.values() if arch.is_gpu)}"

"""The arch table: what an engine can be built for.

`cpu` is lowered to OpenVINO and runs anywhere. The NVIDIA archs are known by name, so that a wrong one explains
itself, but this version does not lower to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UsageError

NVIDIA_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A build target. `backend` is the library that runs its engines."""

    name: str
    backend: str


CPU = Arch(name="cpu", backend="openvino")


def resolve_arch(name: str) -> Arch:
    """Look up an arch by its name on the command line.

    Raises:
        UsageError: the arch is unknown, or known and not lowered by this version.
    """
    if name == CPU.name:
        return CPU
    if name in NVIDIA_ARCHS:
        raise UsageError(
            f"arch {name} needs the TensorRT-LLM target, which this version does not have",
            "build for --arch cpu, which runs on this machine as it is",
        )
    raise UsageError(f"unknown arch {name!r}", f"allowed: {', '.join((CPU.name, *NVIDIA_ARCHS))}")

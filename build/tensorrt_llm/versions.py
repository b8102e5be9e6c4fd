"""The versions that engines of TensorRT-LLM are built and run with: one table, and what is installed.

TensorRT-LLM 1.2.1 is the last stable release that builds engines (`trtllm-build`). The requirements are those of its
own `requirements.txt`, the driver's are those of CUDA 13 (CUDA Compatibility Guide, minor version compatibility).
Versions are read from the metadata of installed packages: nothing is imported.
"""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

REQUIREMENTS = {
    "tensorrt-llm": "==1.2.1",
    "tensorrt": "~=10.14.1",
    "torch": ">=2.9.1,<=2.10.0a0",
    "transformers": "==4.57.3",
    "cuda-python": ">=13",
    "mpi4py": "",
    "numpy": "<2",
}
"""Requirement specifier (PEP 440) of each package; empty where any version will do."""

PYTHON_VERSIONS = ("3.10", "3.12")
"""Those that TensorRT-LLM 1.2.1 has wheels for."""

BUILDER = "trtllm-build"
"""The program that builds engines."""

MIN_DRIVER = 580
"""Branch of NVIDIA's driver that brings CUDA 13."""

MIN_CUDA = (13, 0)
"""What the driver's libcuda must run."""


def installed(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def satisfies(found: str | None, specifier: str) -> bool:
    """Whether a version is there and meets a requirement; pre-releases count, as in NVIDIA's containers."""
    try:
        return found is not None and SpecifierSet(specifier).contains(found, prereleases=True)
    except InvalidVersion:
        return False


def is_supported_python() -> bool:
    """Whether TensorRT-LLM can be installed for the Python that runs this."""
    return ".".join(platform.python_version_tuple()[:2]) in PYTHON_VERSIONS


def missing_for_engines() -> list[str]:
    """What this environment lacks to build an engine, one phrase each; empty where nothing is missing."""
    missing = []
    if not is_supported_python():
        missing.append(f"Python {' or '.join(PYTHON_VERSIONS)} (this is {platform.python_version()})")
    for package, specifier in REQUIREMENTS.items():
        found = installed(package)
        if not satisfies(found, specifier):
            missing.append(f"{package}{specifier} ({'not installed' if found is None else f'this is {found}'})")
    if shutil.which(BUILDER) is None:
        missing.append(f"{BUILDER} on PATH")
    return missing

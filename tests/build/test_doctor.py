"""`harness-build doctor`: each line says what was found, what is needed and what to do; the exit code follows."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from cli_process import Done
from fake_nvml import GIB, FakeGpu, a100, a100_in_mig_mode, h100, install

from harness.build.tensorrt_llm import versions
from harness.build.tensorrt_llm.versions import REQUIREMENTS, missing_for_engines, satisfies

Build = Callable[..., Done]
Prepare = Callable[..., None]
FITTING = {
    "tensorrt-llm": "1.2.1",
    "tensorrt": "10.14.1.48.post1",
    "torch": "2.9.1+cu130",
    "transformers": "4.57.3",
    "cuda-python": "13.1.0",
    "mpi4py": "4.1.1",
    "numpy": "1.26.4",
    "openvino": metadata.version("openvino"),
}
T4 = FakeGpu(name="Tesla T4", compute_capability=(7, 5), uuid="GPU-d0")
B200 = FakeGpu(name="NVIDIA B200", compute_capability=(10, 0), uuid="GPU-e0")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a driver, with memory and disk enough, whatever runs the tests."""
    install(monkeypatch, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 * GIB))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Prepare:
    """Makes the environment one that TensorRT-LLM is installed in, but for what is given."""

    def prepare(python: str = "3.12.3", programs: tuple[str, ...] = ("trtllm-build", "mpirun"), **changed: str) -> None:
        found = FITTING | {name.replace("_", "-"): version for name, version in changed.items()}

        def version(package: str) -> str:
            if not found.get(package):
                raise metadata.PackageNotFoundError(package)
            return found[package]

        monkeypatch.setattr(versions, "version", version)
        monkeypatch.setattr(platform, "python_version", lambda: python)
        monkeypatch.setattr(platform, "python_version_tuple", lambda: tuple(python.split(".")))
        folder = tmp_path / "bin"
        folder.mkdir()
        for program in programs:
            (folder / program).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(folder))

    return prepare


def lines(done: Done) -> dict[str, dict[str, str]]:
    """Lines of the JSON by target and name, such as `sm_90 torch`."""
    return {f"{line['target']} {line['name']}": line for line in json.loads(done.out)}


def not_ok(done: Done) -> dict[str, str]:
    """Status of the lines that are not ok."""
    return {name: line["status"] for name, line in lines(done).items() if line["status"] != "ok"}


@pytest.mark.parametrize("flags", [(), ("--arch", "cpu")], ids=["default", "cpu"])
def test_a_machine_without_a_gpu_is_fit_for_cpu(flags: tuple[str, ...], build: Build) -> None:
    done = build("doctor", *flags, "--json")
    assert (done.code, done.err) == (0, "")
    assert not_ok(done) == {}
    assert {"cpu openvino", "cpu cores", "cpu host memory", "cpu disk"} <= set(lines(done))
    assert ("gpu device" in lines(done)) == (flags == ())
    assert {line["action"] for line in lines(done).values()} == {""}


def test_a_machine_without_a_gpu_is_told_all_that_sm_90_lacks(build: Build) -> None:
    done = build("doctor", "--arch", "sm_90")
    assert (done.code, done.err) == (1, "")
    for name in ("device", "tensorrt-llm", "tensorrt", "cuda-python", "torch", "transformers", "trtllm-build"):
        assert f"fail sm_90  {name}: " in done.out
    assert "there is no NVIDIA driver here" in done.out
    assert "needed: a GPU of sm_90 (H100, " in done.out
    assert "tensorrt-llm: not installed; needed: ==1.2.1\n" in done.out
    assert done.out.count("docs/gpu.md") == 1  # lines with one remedy name it once, after the last
    assert "ok   cpu" not in done.out


def test_native_without_a_gpu_is_an_error(build: Build) -> None:
    build("doctor", "--arch", "native").says("there is no NVIDIA driver here", "nvidia-smi")


def test_an_unknown_arch_is_wrong_usage(build: Build) -> None:
    build("doctor", "--arch", "sm_70").says("unknown arch 'sm_70'", code=2)


@pytest.mark.parametrize("flags", [(), ("--arch", "native"), ("--arch", "sm_90")], ids=" ".join)
def test_a_machine_that_has_all_is_fit(
    flags: tuple[str, ...], build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment()
    install(monkeypatch, h100(0), h100(1))
    done = build("doctor", *flags, "--json")
    assert (done.code, not_ok(done)) == (0, {})
    target = "sm_90" if flags else "gpu"
    assert lines(done)[f"{target} device 1"]["found"] == "NVIDIA H100 80GB HBM3, sm_90"
    assert lines(done)[f"{target} device 1, memory"]["found"] == "79.00 GiB free of 80.00 GiB"
    assert lines(done)[f"{target} CUDA of the driver"]["found"] == "13.0"
    assert missing_for_engines() == []


@pytest.mark.parametrize(
    ("changed", "line", "phrase"),
    [
        ({"torch": "2.10.0"}, "torch", "torch>=2.9.1,<=2.10.0a0 (this is 2.10.0)"),
        ({"torch": "2.9.0"}, "torch", "torch>=2.9.1,<=2.10.0a0 (this is 2.9.0)"),
        ({"tensorrt_llm": "1.3.0rc20"}, "tensorrt-llm", "tensorrt-llm==1.2.1 (this is 1.3.0rc20)"),
        ({"tensorrt": "10.13.3.9"}, "tensorrt", "tensorrt~=10.14.1 (this is 10.13.3.9)"),
        ({"transformers": "5.17.0"}, "transformers", "transformers==4.57.3 (this is 5.17.0)"),
        ({"cuda_python": "12.9.4"}, "cuda-python", "cuda-python>=13 (this is 12.9.4)"),
        ({"numpy": "2.4.6"}, "numpy", "numpy<2 (this is 2.4.6)"),
        ({"mpi4py": ""}, "mpi4py", "mpi4py (not installed)"),
        ({"numpy": "from-source"}, "numpy", "numpy<2 (this is from-source)"),
        ({"python": "3.11.7"}, "Python", "Python 3.10 or 3.12 (this is 3.11.7)"),
        ({"programs": ("mpirun",)}, "trtllm-build", "trtllm-build on PATH"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_thing_that_is_wrong_fails_its_line_alone(
    changed: dict[str, str], line: str, phrase: str, build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(**changed)
    install(monkeypatch, h100(0))
    done = build("doctor", "--arch", "native", "--json")
    assert (done.code, not_ok(done)) == (1, {f"sm_90 {line}": "fail"})
    assert lines(done)[f"sm_90 {line}"]["action"]
    assert missing_for_engines() == [phrase]


def test_another_openvino_than_the_pinned_one_fails(build: Build, environment: Prepare) -> None:
    environment(openvino="2026.3.0")
    done = build("doctor", "--arch", "cpu", "--json")
    assert (done.code, not_ok(done)) == (1, {"cpu openvino": "fail"})
    assert lines(done)["cpu openvino"]["action"] == f"pip install 'openvino=={FITTING['openvino']}'"


@pytest.mark.parametrize(
    ("driver", "cuda", "expected"),
    [
        ("580.65.06", 13000, {}),
        ("570.172.08", 13010, {"sm_90 driver": "warn"}),  # cuda-compat-13-1
        ("570.172.08", 12080, {"sm_90 driver": "fail", "sm_90 CUDA of the driver": "fail"}),
    ],
)
def test_an_older_driver_needs_the_compatibility_package(
    driver: str,
    cuda: int,
    expected: dict[str, str],
    build: Build,
    environment: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment()
    install(monkeypatch, h100(0), driver=driver, cuda=cuda)
    done = build("doctor", "--arch", "sm_90", "--json")
    assert not_ok(done) == expected
    assert done.code == ("fail" in expected.values())


def test_a_device_of_another_arch_fails_and_names_what_to_build(
    build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment()
    install(monkeypatch, a100(0), h100(1))
    done = build("doctor", "--arch", "sm_90", "--json")
    assert (done.code, not_ok(done)) == (1, {"sm_90 device 0": "fail"})
    line = lines(done)["sm_90 device 0"]
    assert line["found"] == "NVIDIA A100-SXM4-80GB, sm_80"
    assert line["needed"].startswith("sm_90 (H100, ")
    assert line["action"].startswith("build with --arch sm_80; or hide")


def test_an_arch_with_limits_warns_of_them(build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    environment()
    install(monkeypatch, B200)
    done = build("doctor", "--arch", "native", "--json")
    assert (done.code, not_ok(done)) == (0, {"sm_100 device 0": "warn"})
    assert "16-bit weights" in lines(done)["sm_100 device 0"]["action"]


def test_a_gpu_that_is_not_built_for_leaves_cpu_fit(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, T4)
    done = build("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    assert not_ok(done) == {"gpu device 0": "warn"}


def test_a_driver_that_does_not_answer_is_a_warning_unless_a_gpu_is_asked_for(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    done = build("doctor", "--json")
    assert (done.code, not_ok(done)) == (0, {"gpu device": "warn"})
    assert not_ok(build("doctor", "--arch", "sm_80", "--json"))["sm_80 device"] == "fail"


def test_a_busy_gpu_little_memory_and_a_full_disk_are_warnings(
    build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(programs=("trtllm-build",))
    busy = h100(0)
    busy.used = 60 * GIB
    install(monkeypatch, busy)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9 * GIB))
    done = build("doctor", "--json")
    warned = ("cpu host memory", "cpu disk", "gpu device 0, memory", "gpu mpirun", "gpu host memory", "gpu disk")
    assert (done.code, not_ok(done)) == (0, dict.fromkeys(warned, "warn"))


def test_a_mig_instance_is_called_one(build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    environment()
    install(monkeypatch, a100_in_mig_mode("MIG-11"))
    done = build("doctor", "--arch", "sm_80", "--json")
    assert done.code == 0
    assert lines(done)["sm_80 device 0"]["found"].endswith("MIG 1g.10gb, sm_80, a MIG instance")


def test_names_from_the_driver_cannot_speak_to_the_terminal(
    build: Build, environment: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment()
    install(monkeypatch, FakeGpu(name="\x1b[2J[red]card[/red]", compute_capability=(9, 0), uuid="GPU-f0"))
    done = build("doctor")
    assert "\x1b" not in done.out
    assert "[red]card[/red], sm_90" in done.out


@pytest.mark.parametrize("package", [name for name in REQUIREMENTS if REQUIREMENTS[name]])
def test_versions_of_nvidias_containers_and_wheels_are_supported(package: str) -> None:
    assert satisfies(FITTING[package], REQUIREMENTS[package])


def test_torch_of_nvidias_container_is_supported() -> None:
    assert satisfies("2.10.0a0+b4e4ee81d3.nv25.12", REQUIREMENTS["torch"])

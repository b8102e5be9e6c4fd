"""The devices that CUDA would show, read through a fake of NVML, and what is said where there is no driver."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pynvml
import pytest
from fake_nvml import GIB, FakeGpu, FakeNvml, a100, a100_in_mig_mode, h100, install

from harness.errors import DeviceError, NoDeviceError
from harness.nvml import devices

FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fake_has_only_functions_of_the_real_library(name: str) -> None:
    real, fake = (inspect.signature(getattr(owner, name)).parameters for owner in (pynvml, FakeNvml))
    required = [parameter for parameter in real.values() if parameter.default is parameter.empty]
    assert len(required) == len(fake) - 1  # without self


def test_a_device_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, h100(0), driver="590.48.01", cuda=13010)
    (device,) = devices()
    assert (device.index, device.name, device.uuid) == (0, "NVIDIA H100 80GB HBM3", "GPU-b000-2222")
    assert device.compute_capability == (9, 0)
    assert (device.total_bytes, device.used_bytes, device.free_bytes) == (80 * GIB, GIB, 79 * GIB)
    assert (device.driver_version, device.cuda_version, device.is_mig) == ("590.48.01", (13, 1), False)
    assert nvml.num_sessions == 0


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, "0123"),
        ("2", "2"),
        ("2, 0", "20"),
        ("0,2,-1,1", "02"),
        ("3,9,1", "3"),
        ("1,,2", "1"),
        ("GPU-a200-1111,GPU-a000", "20"),
        ("GPU-a3,1", "31"),
        ("0,GPU-ffff,1", "0"),
        ("0,GPU-a,1", "0"),  # several begin so
        ("0,UUID,1", "0"),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(
    visible: str | None, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *map(a100, range(4)), visible=visible)
    found = devices()
    assert [device.uuid for device in found] == [f"GPU-a{number}00-1111" for number in numbers]
    assert [device.index for device in found] == list(range(len(numbers)))


@pytest.mark.parametrize("visible", ["", "-1", "4", "none", "0,0", "0,GPU-a000", "9" * 5000, "²", "MIG-1"])
def test_no_visible_device_is_an_error_that_names_the_variable(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, a100(0), a100(1), visible=visible)
    with pytest.raises(NoDeviceError, match=r"CUDA_VISIBLE_DEVICES=.* shows no GPU") as seen:
        devices()
    assert seen.value.hint == "unset it, or choose of GPU-a000-1111,GPU-a100-1111"
    assert nvml.num_sessions == 0


def test_an_index_among_different_gpus_is_refused_unless_the_order_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, a100(0), h100(1), visible="0")
    with pytest.raises(DeviceError, match="in another order than nvidia-smi") as seen:
        devices()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in seen.value.hint
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [device.compute_capability for device in devices()] == [(8, 0)]
    install(monkeypatch, a100(0), h100(1), visible="GPU-b1")
    assert [device.compute_capability for device in devices()] == [(9, 0)]


@pytest.mark.parametrize(
    ("visible", "uuid"), [(None, "MIG-11"), ("0", "MIG-11"), ("GPU-a7", "MIG-11"), ("MIG-22", "MIG-22")]
)
def test_of_a_gpu_in_mig_mode_an_instance_is_seen(
    visible: str | None, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, a100_in_mig_mode(None, "MIG-11", None, "MIG-22"), visible=visible)
    (device,) = devices()
    assert (device.uuid, device.is_mig, device.total_bytes) == (uuid, True, 10 * GIB)
    assert device.compute_capability == (8, 0)


def test_several_devices_with_a_mig_instance_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, a100_in_mig_mode("MIG-11", "MIG-22"), visible="MIG-11,MIG-22")
    with pytest.raises(DeviceError, match="one MIG instance, but 2 devices are visible: MIG-11, MIG-22"):
        devices()


@pytest.mark.parametrize(
    ("gpus", "visible", "words"),
    [
        ([], None, "sees no GPU"),
        ([a100_in_mig_mode()], None, "MIG mode and has no instance"),
        ([a100_in_mig_mode()], "GPU-a7", "shows no GPU"),
    ],
)
def test_a_driver_without_a_usable_gpu_is_said_so(
    gpus: list[FakeGpu], visible: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *gpus, visible=visible)
    with pytest.raises(NoDeviceError, match=words) as seen:
        devices()
    assert seen.value.hint


def test_a_gpu_that_knows_no_mig_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(name="NVIDIA L4", compute_capability=(8, 9), uuid="GPU-c0", has_mig=False)
    install(monkeypatch, gpu)
    assert [device.name for device in devices()] == ["NVIDIA L4"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, NoDeviceError),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, NoDeviceError),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, DeviceError),
        (pynvml.NVML_ERROR_UNKNOWN, DeviceError),
    ],
)
def test_a_driver_that_does_not_start_is_an_error_with_a_hint(
    code: int, kind: type[DeviceError], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, h100(0), init_error=code)
    with pytest.raises(DeviceError) as seen:
        devices()
    assert type(seen.value) is kind
    assert seen.value.hint


def test_a_driver_that_fails_later_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, h100(0))

    def lost(handle: FakeGpu) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lost)
    with pytest.raises(DeviceError, match=r"does not answer \(GPU is lost\)"):
        devices()
    assert nvml.num_sessions == 0
    monkeypatch.setattr(nvml, "nvmlShutdown", lambda: lost(nvml.gpus[0]))
    with pytest.raises(DeviceError, match="GPU is lost"):
        devices()


def test_a_container_without_libcuda_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, h100(0), libcuda=False)
    with pytest.raises(DeviceError, match="libcuda") as seen:
        devices()
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in seen.value.hint


def test_the_real_library_without_a_driver_says_that_there_is_none() -> None:
    """Whatever this machine has: the dynamic linker is shown no driver."""
    code = (
        "import harness.nvml, sys\n"
        "assert 'pynvml' not in sys.modules\n"
        "import pynvml\n"
        "def absent(name): raise OSError(name)\n"
        "pynvml.CDLL = absent\n"
        "try: harness.nvml.devices()\n"
        "except harness.nvml.NoDeviceError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("there is no NVIDIA driver here (NVML Shared Library Not Found)\n  -> install")

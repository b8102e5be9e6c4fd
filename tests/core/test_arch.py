"""The arch table, the arch of a machine, and refusals that name both sides."""

from __future__ import annotations

import pytest
from fake_nvml import FakeGpu, a100, h100, install

from harness.arch import ARCHS, CPU, Arch, arch_of, check_device, native_arch, resolve_arch
from harness.errors import DeviceError, UsageError
from harness.nvml import GpuDevice, devices

GPUS = [arch for arch in ARCHS.values() if arch.is_gpu]
T4 = FakeGpu(name="Tesla T4", compute_capability=(7, 5), uuid="GPU-d0", has_mig=False)


def seen(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> list[GpuDevice]:
    install(monkeypatch, *gpus)
    return devices()


def test_the_table_has_the_archs_of_tensorrt_llm() -> None:
    assert list(ARCHS) == ["cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]
    assert not CPU.is_gpu
    assert [arch.name for arch in GPUS if not arch.integers] == ["sm_100", "sm_103"]
    assert [arch.name for arch in GPUS if arch.latent_attention] == ["sm_90"]
    assert [arch.name for arch in GPUS if arch.caveat] == ["sm_100", "sm_103", "sm_120"]


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("A100", "sm_80"),
        ("A30", "sm_80"),
        ("A10", "sm_86"),
        ("A2", "sm_86"),
        ("L4", "sm_89"),
        ("L20", "sm_89"),
        ("H20", "sm_90"),
        ("GH200", "sm_90"),
        ("B200", "sm_100"),
        ("B300", "sm_103"),
        ("GeForce RTX 50 series", "sm_120"),
    ],
)
def test_a_card_belongs_to_one_arch(card: str, name: str) -> None:
    assert [arch.name for arch in GPUS if card in arch.cards] == [name]


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_an_arch_is_found_by_its_name_and_by_its_compute_capability(arch: Arch) -> None:
    assert resolve_arch(arch.name) is arch
    assert arch.compute_capability is not None
    assert arch_of(arch.compute_capability) is arch
    assert arch.name == "sm_{}{}".format(*arch.compute_capability)
    assert arch.cards


@pytest.mark.parametrize("name", ["sm_75", "SM_90", "", "cuda", "sm_90a"])
def test_an_unknown_arch_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UsageError, match=f"unknown arch '{name}'") as error:
        resolve_arch(name)
    assert "sm_80, sm_86" in error.value.hint


def test_compute_capabilities_that_are_not_built_for_have_no_arch() -> None:
    assert [arch_of(pair) for pair in ((7, 5), (8, 7), (11, 0), (12, 1))] == [None] * 4


def test_native_is_the_arch_of_all_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_arch(seen(monkeypatch, h100(0), h100(1))).name == "sm_90"


def test_native_with_devices_of_two_archs_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError) as error:
        native_arch(seen(monkeypatch, a100(0), h100(1)))
    assert "device 0 is NVIDIA A100-SXM4-80GB, sm_80; device 1 is NVIDIA H100 80GB HBM3, sm_90" in error.value.message
    assert "--arch" in error.value.hint
    assert "CUDA_VISIBLE_DEVICES" in error.value.hint


def test_native_on_a_card_that_is_not_built_for_names_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="device 0 is Tesla T4, sm_75, which this version does not") as error:
        native_arch(seen(monkeypatch, T4))
    assert "sm_80 (A100, A800, A30), sm_86" in error.value.hint


def test_devices_of_the_arch_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(resolve_arch("sm_80"), seen(monkeypatch, a100(0), a100(1)))


def test_building_for_another_arch_names_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError) as error:
        check_device(resolve_arch("sm_86"), seen(monkeypatch, a100(0)))
    assert error.value.message.startswith("--arch sm_86 (A10, A40, ")
    assert error.value.message.endswith("), but device 0 is NVIDIA A100-SXM4-80GB, sm_80")
    assert error.value.hint == "build with --arch sm_80"


def test_loading_an_engine_of_another_arch_names_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError) as error:
        check_device(resolve_arch("sm_89"), seen(monkeypatch, h100(0)), built=True)
    assert error.value.message.startswith("the engine was built for sm_89 (L4, ")
    assert error.value.message.endswith("), but device 0 is NVIDIA H100 80GB HBM3, sm_90")
    assert error.value.hint == "rebuild with --arch sm_90"


def test_where_some_devices_fit_the_others_are_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="but device 1 is NVIDIA A100") as error:
        check_device(resolve_arch("sm_90"), seen(monkeypatch, h100(0), a100(1), h100(2)))
    assert error.value.hint.endswith("CUDA_VISIBLE_DEVICES=GPU-b000-2222,GPU-b200-2222")


def test_a_device_that_is_not_built_for_gets_no_advice_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="device 0 is Tesla T4, sm_75") as error:
        check_device(resolve_arch("sm_80"), seen(monkeypatch, T4))
    assert error.value.hint.startswith("GPU archs of this version: sm_80")

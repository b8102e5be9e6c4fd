"""What the PyTorch backend of TensorRT-LLM can take, checked on shapes and a recipe, before any work is spent.

Its linear layers know two integer forms that a quantized checkpoint of ours can be written in: W4A16_AWQ (symmetric
int4 in groups of 64 or 128) and W8A16 (int8 per output channel). Sources: `modules/linear.py`, `model_config.py` and
`quantization/functional.py` of TensorRT-LLM 1.2 to 1.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from harness.arch import Arch
from harness.errors import RecipeError, UnsupportedModelError, UsageError
from harness.recipe import Precision, fused_groups, in_decoder, linear_shapes
from harness.spec import GqaSpec, MlaSpec, ModelSpec

BACKEND = "trtllm-pytorch"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GROUP_SIZES = (64, 128)
_ROW_PARALLEL = (".o_proj", ".down_proj")  # ranks share their inputs; of all others, their outputs
_KEYS_AND_VALUES = (".k_proj", ".v_proj")
_ROWS = 16
_OLDEST, _NEWEST = (8, 0), (10, 3)
_INTERLEAVED_BEFORE = (9, 0)


def check_expressible(
    spec: ModelSpec,
    resolved: Mapping[str, Precision],
    arch: Arch | None = None,
    tp_size: int = 1,
    kv_cache_dtype: str | None = None,
) -> None:
    """Refuse what a folder for the PyTorch backend cannot say, or its kernels cannot run. Embeddings stay 16-bit.

    Args:
        resolved: the precision of each module, as `Recipe.resolve` gives it.
        arch: the GPU to serve on; None checks for the least demanding.
        tp_size: GPUs that share each layer.
        kv_cache_dtype: `int8` where that was asked for.

    Raises:
        UnsupportedModelError: the family is none of `ARCHITECTURES`.
        UsageError: the arch, the number of GPUs or the KV cache cannot be had.
        RecipeError: a layer has a precision or a shape that cannot be run; names it.
    """
    _check_family(spec)
    if kv_cache_dtype == "int8":
        raise UsageError(
            f"--backend {BACKEND} has no int8 KV cache",
            "leave it 16-bit; TensorRT-LLM itself can make it fp8 when the folder is served (kv_cache_config.dtype)",
        )
    decoder = {module: precision for module, precision in resolved.items() if in_decoder(module)}
    integers = {module: precision for module, precision in decoder.items() if precision.dtype != "f16"}
    _check_arch(arch, bool(integers))
    _check_ranks(spec, tp_size, has_kv_scales=any(module.endswith(_KEYS_AND_VALUES) for module in integers))
    for group in fused_groups(spec):
        if len({_stored_as(decoder[module]) for module in group}) > 1:
            given = ", ".join(f"{module} ({decoder[module]})" for module in group)
            raise RecipeError(f"{given} are fused into one matrix", "give them one precision")
    shapes = linear_shapes(spec)
    in_multiple = 64 if _interleaves(arch) else 32
    for module, precision in integers.items():
        _check_precision(module, precision)
        _check_shape(module, precision, shapes[module], tp_size, in_multiple, arch)


def _check_family(spec: ModelSpec) -> None:
    if spec.architecture in ARCHITECTURES and spec.moe is None and isinstance(spec.attention, GqaSpec):
        return
    parts = ["latent attention"] * isinstance(spec.attention, MlaSpec) + ["routed experts"] * (spec.moe is not None)
    released = spec.architecture == "DeepseekV3ForCausalLM"
    raise UnsupportedModelError(
        f"--backend {BACKEND} is not offered for {spec.architecture} ({' and '.join(parts)}): the backend runs int4 "
        "and int8 weights in plain layers alone",
        "give TensorRT-LLM the model's own release, which it reads as it is: trtllm-serve MODEL --backend pytorch"
        if released
        else "build an engine of 16-bit weights: --arch sm_90 --precision f16",
    )


def _check_arch(arch: Arch | None, has_integers: bool) -> None:
    if arch is None:
        return
    if arch.compute_capability is None:
        raise UsageError(f"--backend {BACKEND} is for NVIDIA's GPUs, not for {arch.name}", "give --arch sm_90, or none")
    if has_integers and not _OLDEST <= arch.compute_capability <= _NEWEST:
        raise UsageError(
            f"on {arch.describe()}, the PyTorch backend has no int4 and int8 layers that are known to be right: its "
            "kernels for them are for sm_80 to sm_103",
            "build 16-bit weights for it: --precision f16",
        )


def _check_ranks(spec: ModelSpec, tp_size: int, *, has_kv_scales: bool) -> None:
    if tp_size < 1:
        raise UsageError(f"--tp is {tp_size}", "allowed: 1 or more")
    assert isinstance(spec.attention, GqaSpec), "the family was checked"
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    # where there are more GPUs than heads of keys and values, the backend copies their weights, but not their scales
    undivided = kv_heads % tp_size and (has_kv_scales or tp_size % kv_heads)
    for what, count, wrong in (
        ("attention heads", heads, heads % tp_size),
        ("key and value heads", kv_heads, undivided),
        ("rows of an MLP", spec.intermediate_size, spec.intermediate_size % tp_size),
    ):
        if wrong:
            raise UsageError(f"--tp {tp_size} does not divide {count} {what}", "give a smaller --tp, or none")


def _check_precision(module: str, precision: Precision) -> None:
    if precision.dtype == "int8":
        return
    if not precision.symmetric:
        _refuse(module, precision, "the PyTorch backend reads no zero points", "without -zp")
    if precision.group_size is None:
        _refuse(module, precision, "the PyTorch backend reads int4 in groups", "int4-g128 or int4-g64, or int8")
    if precision.group_size not in GROUP_SIZES:
        _refuse(module, precision, "the PyTorch backend reads groups of 64 and 128", "int4-g64 or int4-g128, or int8")


def _check_shape(
    module: str, precision: Precision, shape: tuple[int, int], tp_size: int, in_multiple: int, arch: Arch | None
) -> None:
    out, inner = shape
    ranks = f" on each of {tp_size} GPUs" if tp_size > 1 else ""
    if module.endswith(_ROW_PARALLEL):
        inner //= tp_size
    else:
        out //= tp_size
    if precision.group_size and inner % precision.group_size:
        reason = f"it has {inner} inputs{ranks}, not whole groups of {precision.group_size}"
        _refuse(module, precision, reason, "int8, or a smaller --tp")
    if inner % in_multiple:
        where = f" on {arch.describe()}" if arch else ""
        _refuse(module, precision, f"its kernel{where} needs a multiple of {in_multiple} inputs, not {inner}{ranks}")
    if out % _ROWS:
        _refuse(module, precision, f"its kernel needs a multiple of {_ROWS} outputs, not {out}{ranks}")


def _refuse(module: str, precision: Precision, reason: str, instead: str = "f16") -> NoReturn:
    raise RecipeError(
        f"{module} is {precision}, which --backend {BACKEND} cannot express: {reason}",
        f"give it another precision in the recipe ({instead}) and calibrate again",
    )


def _stored_as(precision: Precision) -> tuple[str, int | None]:
    """What decides the form on disk: int8 activations do not."""
    return precision.dtype, precision.group_size


def _interleaves(arch: Arch | None) -> bool:
    """Whether kernels read weights in tiles of 64 inputs: those of Ampere and Ada do."""
    return arch is not None and arch.compute_capability is not None and arch.compute_capability < _INTERLEAVED_BEFORE

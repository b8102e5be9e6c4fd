"""Which models the engine flow of TensorRT-LLM 1.2.1 takes in which precision, checked before any work is spent.

Sources: `tensorrt_llm/models/__init__.py`, the builder's own checks per compute capability, and the constructors of its
quantized linear layers, which pad a matrix silently where a size does not fit, so that no checkpoint fits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NoReturn

from harness.arch import Arch
from harness.build.tensorrt_llm.linears import FusedLinear, layer_linears
from harness.build.tensorrt_llm.ranks import Ranks, check_ranks
from harness.errors import RecipeError, UnsupportedModelError, UsageError
from harness.recipe import Precision, in_decoder
from harness.rope import YarnScaling
from harness.spec import GqaSpec, MlaSpec, ModelSpec

DENSE_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
LATENT_FAMILY = "DeepseekV2ForCausalLM"
GROUP_SIZES = (64, 128)
_LEAST_MULTIPLE = 64
LATENT_CAVEAT = (
    "DeepSeek-V2's attention looks unfinished in the newest sources of the engine builder that are known: expect "
    "trtllm-build to fail, and try it with a small --max-model-len before you count on it"
)
_PYTORCH = "serve the Hugging Face weights with TensorRT-LLM's PyTorch backend: trtllm-serve MODEL --backend pytorch"


def check_family(
    spec: ModelSpec,
    arch: Arch | None,
    resolved: Mapping[str, Precision],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    kv_dtype: Literal["auto", "int8"] = "auto",
) -> None:
    """Refuse what cannot become an engine. Embeddings and `lm_head` are 16-bit in one, whatever was resolved for them.

    Args:
        arch: the GPU to build for; None checks for the least demanding.
        resolved: the precision of each module, as `Recipe.resolve` gives it.

    Raises:
        UnsupportedModelError: the family, or a part of the model, is not one that TensorRT-LLM reads.
        UsageError: the arch, the number of ranks or the KV cache cannot be had.
        RecipeError: a layer has a precision or a size that has no kernel; names it.
    """
    quantized = {m: p for m, p in resolved.items() if in_decoder(m) and p.dtype != "f16"}
    if spec.architecture == LATENT_FAMILY:
        _check_latent(spec, arch, quantized, kv_dtype)
    elif spec.architecture in DENSE_FAMILIES:
        _check_rope(spec)
    else:
        _refuse_family(spec)
    if arch is not None and not arch.integers and (quantized or kv_dtype == "int8"):
        what = "int4 and int8 weights" if quantized else "an int8 KV cache"
        raise UsageError(
            f"{arch.describe()} cannot run {what}: {arch.caveat or 'TensorRT-LLM 1.2.1 has no kernels for it there'}",
            "build 16-bit weights for it: --precision f16" if quantized else "leave out --kv-cache-dtype int8",
        )
    ranks = Ranks(tp_size=tp_size, pp_size=pp_size)
    check_ranks(spec, ranks)
    has_int4 = any(precision.dtype == "int4" for precision in quantized.values())
    if isinstance(spec.attention, GqaSpec) and (spec.attention.o_bias or spec.mlp_bias) and has_int4 and tp_size > 1:
        raise UsageError(
            "TensorRT-LLM 1.2.1 drops biases of o_proj and down_proj on all ranks but the first where layers are int4",
            "leave out --tp, or give a recipe without int4",
        )
    if isinstance(spec.attention, GqaSpec):
        for layer in range(spec.num_layers):
            for linear in layer_linears(spec, layer):
                _check_linear(linear, resolved[linear.first], ranks)


def _refuse_family(spec: ModelSpec) -> NoReturn:
    if spec.architecture == "DeepseekV3ForCausalLM":
        raise UnsupportedModelError(
            "TensorRT-LLM 1.2.1 builds no engines of DeepSeek-V3's family (V3, R1, V3.1, V3.2, V4): it has no "
            "DeepseekV3ForCausalLM among the models of its engine builder",
            _PYTORCH,
        )
    raise UnsupportedModelError(
        f"{spec.architecture} is not lowered to TensorRT-LLM engines",
        f"lowered are {', '.join((*DENSE_FAMILIES, LATENT_FAMILY))}; give --backend trtllm-pytorch, which takes Qwen3",
    )


def _check_rope(spec: ModelSpec) -> None:
    scaling = spec.rope.scaling
    if isinstance(scaling, YarnScaling) and (scaling.attention_factor is not None or not scaling.truncate):
        option = "truncate" if scaling.attention_factor is None else "attention_factor"
        raise UnsupportedModelError(
            f"TensorRT-LLM 1.2.1 does not read {option} of the YaRN scaling in rope_scaling",
            "remove rope_scaling from config.json to serve the context that the model was first trained with",
        )


def _check_latent(
    spec: ModelSpec, arch: Arch | None, quantized: Mapping[str, Precision], kv_dtype: Literal["auto", "int8"]
) -> None:
    if arch is not None and not arch.latent_attention:
        raise UsageError(
            f"{arch.describe()} has no kernels for the latent attention of DeepSeek-V2 in TensorRT-LLM 1.2.1",
            "build for --arch sm_90",
        )
    for module, precision in quantized.items():
        raise RecipeError(
            f"{module} is {precision}: TensorRT-LLM 1.2.1 runs DeepSeek-V2 in bfloat16 alone",
            "build 16-bit weights: --precision f16",
        )
    if kv_dtype == "int8":
        raise UsageError("the latent KV cache of DeepSeek-V2 cannot be int8", "leave out --kv-cache-dtype int8")
    fault = _latent_fault(spec)
    if fault:
        raise UnsupportedModelError(f"TensorRT-LLM 1.2.1 cannot run this DeepSeek-V2: {fault}", _PYTORCH)


def _latent_fault(spec: ModelSpec) -> str:
    """What its model code takes for granted of DeepSeek-V2 and this model has otherwise; empty where it fits."""
    a, moe, scaling = spec.attention, spec.moe, spec.rope.scaling
    assert isinstance(a, MlaSpec)
    if not isinstance(scaling, YarnScaling) or scaling.mscale is None or scaling.mscale_all_dim is None:
        return "its rope_scaling is not YaRN with mscale and mscale_all_dim"
    if scaling.attention_factor is not None or not scaling.truncate:
        return "its rope_scaling has attention_factor or truncate"
    if a.bias:
        return "its attention has biases"
    if a.v_head_dim != a.qk_nope_head_dim:
        return f"v_head_dim is {a.v_head_dim} and qk_nope_head_dim {a.qk_nope_head_dim}, which must be equal"
    if moe is None or not moe.num_shared_experts:
        return "it has no routed or no shared experts"
    if moe.first_k_dense != 1:
        return f"first_k_dense_replace is {moe.first_k_dense}; only the first layer can be dense"
    if moe.num_groups == 1 and moe.routed_scaling_factor != 1.0:
        return f"routed_scaling_factor is {moe.routed_scaling_factor} without groups of experts"
    return ""


def _check_linear(linear: FusedLinear, precision: Precision, ranks: Ranks) -> None:
    if precision.dtype != "int4":
        return
    for module in linear.modules:
        if not precision.symmetric:
            _refuse(module, precision, "it has zero points")
        if precision.group_size not in GROUP_SIZES:
            _refuse(module, precision, f"groups are of {' or '.join(map(str, GROUP_SIZES))} there")
    multiple = max(_LEAST_MULTIPLE, precision.group_size or 0) * ranks.tp_size
    inner = linear.modules[linear.first][1]
    out = linear.rank_shape(ranks)[0] * (1 if linear.row_parallel else ranks.tp_size)
    for size, what in ((inner, "inputs"), (out, "outputs")):
        if size % multiple:
            raise RecipeError(
                f"{' + '.join(linear.modules)} in {precision} with --tp {ranks.tp_size} needs a multiple of {multiple} "
                f"{what}, it has {size}",
                "give a smaller --tp, or another precision in the recipe (int4-g64, int8, f16) and calibrate again",
            )


def _refuse(module: str, precision: Precision, reason: str) -> NoReturn:
    raise RecipeError(
        f"{module} is {precision}, which TensorRT-LLM cannot run: {reason}",
        "give it int4-g128 or int4-g64 in the recipe; calibrate again --for portable what was made --for cpu",
    )

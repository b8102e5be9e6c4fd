"""GGUF files of Llama and Qwen2 as weight sources: Hugging Face's names, config, row order and tokenizer.

Llama's GGUF files have the rows of q and k reordered so that rotary pairs are neighbours; here that is undone. Weights
come out dequantized, so they lie on the file's own quantization grid.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from harness.build.fingerprint import fingerprint_files
from harness.build.gguf_file import GgufFile, GgufTensor
from harness.build.gguf_tokenizer import read_generation_config, read_tokenizer
from harness.errors import SourceError, UnsupportedModelError
from harness.rope import Llama3Scaling, RopeSpec
from harness.spec import ModelSpec
from harness.weight_source import FloatArray, TokenizerFiles, row_range, safe_name

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_CHUNK_VALUES = 1 << 22  # dequantizing takes several times the memory of its result


class GgufSource:
    """A `WeightSource` over one GGUF file.

    Raises:
        SourceError: the file is truncated or corrupt, or lacks a field.
        UnsupportedModelError: an architecture, tensor or option that is not converted here; names it.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        self.name = safe_name(path.stem)
        self._arch = self._check_architecture()
        self._tensors = {
            self._hf_name(name): tensor for name, tensor in self._file.tensors.items() if name != _ROPE_FACTORS
        }
        self.config = self._read_config()

    @cached_property
    def spec(self) -> ModelSpec:
        """The typed description of the model."""
        return ModelSpec.from_hf_config(self.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """BOS and everything that ends a turn, as token ids."""
        return read_generation_config(self._file.metadata)

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """Tokenizer and chat template, converted.

        Raises:
            UnsupportedModelError: not a byte-level BPE tokenizer, or one that cuts text in an unknown way.
            SourceError: its parts do not fit together.
        """
        return read_tokenizer(self._file.metadata)

    def names(self) -> frozenset[str]:
        """All tensor names, as Hugging Face has them."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._find(name).shape

    def read(self, name: str, rows: slice | None = None) -> FloatArray:
        """A tensor, or some rows of it, dequantized, as a new float32 array.

        Raises:
            SourceError: no such tensor.
            UnsupportedModelError: its quantization has no decoder.
        """
        tensor = self._find(name)
        start, stop = row_range(tensor.shape, rows)
        order = self._row_order(name, tensor.shape[0])
        out = np.empty((stop - start, *tensor.shape[1:]), np.float32)
        step = max(1, _CHUNK_VALUES * tensor.shape[0] // int(np.prod(tensor.shape)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            picked = tensor.rows[first:last] if order is None else tensor.rows[order[first:last]]
            try:
                out[first - start : last - start] = dequantize(picked, tensor.type).reshape(-1, *tensor.shape[1:])
            except NotImplementedError:
                raise UnsupportedModelError(
                    f"{self._file.path}: tensor {name} is of type {tensor.type.name}, which cannot be decoded",
                    "use another file of the model, such as Q8_0 or F16",
                ) from None
        return out

    def fingerprint(self) -> str:
        """Content hash of the file, which holds weights, config and tokenizer."""
        return fingerprint_files({"model.gguf": self._file.path})

    def _find(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise SourceError(f"{self._file.path} has no tensor {name}", "download the file again, or use another one")
        return tensor

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.intp] | None:
        """For Llama's q and k, which row of the file each row is; None where they are in order.

        The file has, a head at a time, pairs `(2, head_dim / 2)` transposed.
        """
        projection = name.split(".")[-2] if self._arch == "llama" else ""
        if projection not in ("q_proj", "k_proj"):
            return None
        num_heads = self.config["num_attention_heads" if projection == "q_proj" else "num_key_value_heads"]
        return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _check_architecture(self) -> str:
        metadata, path = self._file.metadata, self._file.path
        arch = metadata.get("general.architecture")
        if arch not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: GGUF files of architecture {arch!r} are not supported",
                f"supported: {', '.join(_ARCHITECTURES)}; use the model's Hugging Face folder",
            )
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError(f"{path} is one part of a split model", "join the parts with llama-gguf-split")
        if metadata.get(f"{arch}.expert_count"):
            raise UnsupportedModelError(f"{path} has experts, which are not converted", "use its Hugging Face folder")
        return str(arch)

    def _hf_name(self, name: str) -> str:
        match = _TENSOR_NAME.fullmatch(name)
        layer, module, kind = match.groups() if match else (None, "", "")
        known = _GLOBAL_NAMES.get(module) if layer is None else _LAYER_NAMES.get(module)
        if known is None:
            raise UnsupportedModelError(
                f"{self._file.path}: tensor {name} has no counterpart in {_ARCHITECTURES[self._arch]}",
                "use the model's Hugging Face folder",
            )
        return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"

    def _field(self, key: str, *, default: int | float | None = None) -> Any:
        value = self._file.metadata.get(f"{self._arch}.{key}", default)
        if not isinstance(value, int | float) or value <= 0:  # missing, or a list with a value for each layer
            raise SourceError(
                f"{self._file.path}: {self._arch}.{key} is {value!r}, a number is needed", "use another file"
            )
        return value

    def _read_config(self) -> dict[str, Any]:
        """The config.json that the file's metadata stands for."""
        num_heads, hidden_size = self._field("attention.head_count"), self._field("embedding_length")
        head_dim = self._field("attention.key_length", default=hidden_size // num_heads)
        theta = float(self._field("rope.freq_base", default=10000.0))
        if self._field("rope.dimension_count", default=head_dim) != head_dim:
            raise UnsupportedModelError(f"{self._file.path}: rotary embedding of a part of a head", "use another model")
        config = {
            "architectures": [_ARCHITECTURES[self._arch]],
            "model_type": self._arch,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self._field("feed_forward_length"),
            "num_hidden_layers": self._field("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._field("attention.head_count_kv", default=num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._field("context_length"),
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon"),
            "rope_theta": theta,
            "vocab_size": self._find("model.embed_tokens.weight").shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
        }
        scaling = self._rope_scaling(theta, head_dim)
        return config | ({"rope_scaling": scaling} if scaling else {})

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        factors = self._file.tensors.get(_ROPE_FACTORS)
        if factors is not None:
            return self._llama3_scaling(dequantize(factors.rows, factors.type).reshape(-1), theta, head_dim)
        prefix = f"{self._arch}.rope.scal"  # `scaling.type` and so on, or the older `scale_linear`
        given = {key.removeprefix(prefix): v for key, v in self._file.metadata.items() if key.startswith(prefix)}
        kind = given.pop("ing.type", "linear" if "e_linear" in given else "none")
        given.pop("ing.finetuned", None)
        names = {"ing.factor": "factor", "e_linear": "factor"}
        if kind == "yarn":
            names |= {"ing.original_context_length": "original_max_position_embeddings"}
            names |= {"ing.yarn_beta_fast": "beta_fast", "ing.yarn_beta_slow": "beta_slow"}
        scaling = {names[key]: value for key, value in given.items() if key in names}
        if kind == "none":
            return None
        if kind not in ("linear", "yarn") or given.keys() - names.keys() or "factor" not in scaling:
            raise UnsupportedModelError(
                f"{self._file.path}: rope scaling {kind!r} with {given} is not converted",
                "use the model's Hugging Face folder",
            )
        return {"rope_type": kind, **scaling}

    def _llama3_scaling(self, factors: FloatArray, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling: the file has its factors, the config the numbers they were made from.

        Every Llama 3 release has the same three of those numbers; they are taken if they give these very factors.
        """
        guess: dict[str, Any] = {
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        fits = 2 * len(factors) == head_dim  # first: a broken file may say anything of head_dim
        if fits:
            try:
                scaled = RopeSpec(theta=theta, dim=head_dim, scaling=Llama3Scaling(**guess)).inv_freq()
            except ValueError as error:
                raise SourceError(f"{self._file.path}: {error}", "download the file again, or use another") from None
            expected = RopeSpec(theta=theta, dim=head_dim).inv_freq() / scaled
            fits = np.allclose(factors, expected, rtol=1e-4)
        if not fits:
            raise UnsupportedModelError(
                f"{self._file.path}: its rotary factors ({_ROPE_FACTORS}) are not those of Llama 3",
                "use the model's Hugging Face folder",
            )
        return {"rope_type": "llama3", **guess}

"""The quantization recipe: which precision each linear layer of a model gets.

A recipe is an ordered list of rules over Hugging Face module names (`model.layers.0.self_attn.q_proj`, `lm_head`,
`model.embed_tokens`); the first match wins. It knows nothing of how integers are chosen: round to nearest and
calibrated quantizers fill the same recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import RecipeError
from harness.spec import MlaSpec, ModelSpec

_NOTATION = re.compile(r"^(f16|int8|int4)(?:-(channel|g(\d+)))?(-zp|-a8)?$")
_SUFFIX_OF = {"-zp": "int4", "-a8": "int8"}
GROUP_SIZES = (32, 64, 128)
PRESETS = ("f16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How one weight matrix `(out, in)` is stored.

    `f16`: half precision. `int8`: one scale per output channel, symmetric; with `int8_activations`, its inputs are
    quantized to int8 too where the arch multiplies integers. `int4`: one scale per group of `group_size` inputs, or per
    output channel where it is None; symmetric, or with a zero point per group.

    Written as `f16`, `int8`, `int8-a8`, `int4-g128`, `int4-channel`, each int4 form with `-zp` for zero points.
    """

    dtype: Literal["f16", "int8", "int4"]
    group_size: int | None = None
    symmetric: bool = True
    int8_activations: bool = False

    def __post_init__(self) -> None:
        if self.int8_activations and self.dtype != "int8":
            raise ValueError(f"{self.dtype} with int8 activations: only int8 weights have them")
        if self.group_size is not None and (self.dtype != "int4" or self.group_size not in GROUP_SIZES):
            raise ValueError(f"group_size {self.group_size} with {self.dtype}: only int4 has groups, of {GROUP_SIZES}")
        if not self.symmetric and self.dtype != "int4":
            raise ValueError(f"{self.dtype} has no zero points; only int4 does")

    def __str__(self) -> str:
        if self.dtype != "int4":
            return self.dtype + "-a8" * self.int8_activations
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"int4-{group}{'' if self.symmetric else '-zp'}"

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Read the written form. `int4` alone means group 128, symmetric.

        Raises:
            RecipeError: not a precision.
        """
        found = _NOTATION.match(text)
        if not found or (found[1] != "int4" and found[2]) or (found[4] and found[1] != _SUFFIX_OF[found[4]]):
            raise RecipeError(
                f"unknown precision {text!r}",
                "allowed: f16, int8, int8-a8, int4-channel, int4-g32, -g64, -g128, each int4 with -zp",
            )
        if found[1] != "int4":
            return cls(dtype=found[1], int8_activations=found[4] is not None)  # type: ignore[arg-type]
        group_size = int(found[3]) if found[3] else (None if found[2] else 128)
        try:
            return cls(dtype="int4", group_size=group_size, symmetric=found[4] is None)
        except ValueError as error:
            raise RecipeError(str(error), "allowed group sizes: 32, 64, 128") from None

    def fit(self, in_features: int) -> Precision:
        """This precision, or the nearest that a matrix of so many inputs can be stored in.

        A group that does not divide the inputs falls to the largest smaller one that does, else to per channel; int4
        over an odd number of inputs, which cannot be packed, to int8.
        """
        if self.dtype == "int4" and in_features % 2:
            return INT8
        if self.group_size is None or in_features % self.group_size == 0:
            return self
        fitting = [g for g in GROUP_SIZES if g < self.group_size and in_features % g == 0]
        return Precision(dtype="int4", group_size=max(fitting) if fitting else None, symmetric=self.symmetric)

    def bits_per_weight(self, in_features: int) -> float:
        """Storage in bits per weight, f16 scales and 4-bit zero points included."""
        if self.dtype == "f16":
            return 16.0
        per_scale = self.group_size or in_features
        bits = 8.0 if self.dtype == "int8" else 4.0
        return bits + (16 + (0 if self.symmetric else 4)) / per_scale


F16 = Precision(dtype="f16")
INT8 = Precision(dtype="int8")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Ordered rules `(pattern, precision)`; patterns are shell-style, matched against whole module names."""

    name: str
    rules: tuple[tuple[str, Precision], ...]

    def precision_of(self, module: str) -> Precision:
        """The precision of one module.

        Raises:
            RecipeError: no rule matches.
        """
        return self.rules[self._first_match(module)][1]

    @cached_property
    def _rules_by_kind(self) -> tuple[dict[str, int], list[int]]:
        """Number of the rule that names a module exactly, and those of rules with wildcards: recipes may be long."""
        exact: dict[str, int] = {}
        wild = []
        for number, (pattern, _) in enumerate(self.rules):
            if set(pattern) & set("*?["):
                wild.append(number)
            else:
                exact.setdefault(pattern, number)
        return exact, wild

    def _first_match(self, module: str) -> int:
        exact, wild = self._rules_by_kind
        named = exact.get(module, len(self.rules))
        for number in wild:
            if number > named:
                break
            if fnmatchcase(module, self.rules[number][0]):
                return number
        if named == len(self.rules):
            raise RecipeError(f"recipe {self.name!r} has no rule for {module}", 'end it with a rule that matches "*"')
        return named

    def resolve(self, spec: ModelSpec) -> dict[str, Precision]:
        """Precision of every quantizable module of a model, in model order.

        Each is fitted to its layer's inputs, as `Precision.fit` says.

        Raises:
            RecipeError: a rule is missing, or modules that are fused into one matrix differ.
        """
        shapes = linear_shapes(spec)
        resolved = {name: self.precision_of(name).fit(shape[1]) for name, shape in shapes.items()}
        for layer_modules in fused_groups(spec):
            by_precision = {resolved[name]: name for name in reversed(layer_modules)}
            if len(by_precision) > 1:
                given = ", ".join(f"{name} ({precision})" for precision, name in by_precision.items())
                raise RecipeError(f"{given} are fused into one matrix", "give them one precision")
        return resolved

    def unused_rules(self, spec: ModelSpec) -> list[str]:
        """Patterns that decide no module of a model: often a misspelt name."""
        used = {self._first_match(module) for module in linear_shapes(spec)}
        return [pattern for number, (pattern, _) in enumerate(self.rules) if number not in used]


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """`(out, in)` of every module a recipe speaks of, by Hugging Face name, in model order.

    The router, the norms and MLA's `kv_b_proj` (absorbed at lowering, which contracts over its outputs) are not in it.
    A tied `lm_head` is not either: it is the embedding.
    """
    shapes: dict[str, tuple[int, int]] = {"model.embed_tokens": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= _attention_shapes(spec, f"model.layers.{layer}.self_attn")
        shapes |= _mlp_shapes(spec, layer, f"model.layers.{layer}.mlp")
    if not spec.tie_word_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def in_decoder(name: str) -> bool:
    """Whether a module or a tensor is of a decoder layer: embeddings, the last norm and `lm_head` are not."""
    return name.startswith("model.layers.")


def is_routed_expert(module: str) -> bool:
    """Whether a module is of an expert that a router chooses; shared experts are not."""
    return ".mlp.experts." in module


def _attention_shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, int]]:
    a, hidden = spec.attention, spec.hidden_size
    if isinstance(a, MlaSpec):
        query = {"q_proj": (a.num_heads * a.qk_head_dim, hidden)}
        if a.q_lora_rank is not None:
            query = {
                "q_a_proj": (a.q_lora_rank, hidden),
                "q_b_proj": (a.num_heads * a.qk_head_dim, a.q_lora_rank),
            }
        shapes = query | {
            "kv_a_proj_with_mqa": (a.kv_lora_rank + a.qk_rope_head_dim, hidden),
            "o_proj": (hidden, a.num_heads * a.v_head_dim),
        }
    else:
        shapes = {
            "q_proj": (a.num_heads * a.head_dim, hidden),
            "k_proj": (a.num_kv_heads * a.head_dim, hidden),
            "v_proj": (a.num_kv_heads * a.head_dim, hidden),
            "o_proj": (hidden, a.num_heads * a.head_dim),
        }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[int, int]]:
    def mlp(name: str, width: int) -> dict[str, tuple[int, int]]:
        hidden = spec.hidden_size
        return {
            f"{name}.gate_proj": (width, hidden),
            f"{name}.up_proj": (width, hidden),
            f"{name}.down_proj": (hidden, width),
        }

    if not spec.is_moe_layer(layer) or spec.moe is None:
        return mlp(prefix, spec.intermediate_size)
    shapes: dict[str, tuple[int, int]] = {}
    for expert in range(spec.moe.num_experts):
        shapes |= mlp(f"{prefix}.experts.{expert}", spec.moe.moe_intermediate_size)
    if spec.moe.num_shared_experts:
        shapes |= mlp(f"{prefix}.shared_experts", spec.moe.moe_intermediate_size * spec.moe.num_shared_experts)
    return shapes


def fused_groups(spec: ModelSpec) -> list[list[str]]:
    """Modules that lowering joins into one matrix, so that they must share a precision."""
    groups: list[list[str]] = []
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        if isinstance(spec.attention, MlaSpec):
            first = "q_proj" if spec.attention.q_lora_rank is None else "q_a_proj"
            groups.append([f"{prefix}.self_attn.{n}" for n in (first, "kv_a_proj_with_mqa")])
        else:
            groups.append([f"{prefix}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj")])
        if not spec.is_moe_layer(layer) or spec.moe is None:
            groups.append([f"{prefix}.mlp.{n}" for n in ("gate_proj", "up_proj")])
            continue
        experts = [f"{prefix}.mlp.experts.{e}" for e in range(spec.moe.num_experts)]
        groups.append([f"{e}.{n}" for e in experts for n in ("gate_proj", "up_proj")])
        groups.append([f"{e}.down_proj" for e in experts])
        if spec.moe.num_shared_experts:
            groups.append([f"{prefix}.mlp.shared_experts.{n}" for n in ("gate_proj", "up_proj")])
    return groups


def num_linear_parameters(spec: ModelSpec) -> int:
    """Weights in all modules a recipe speaks of (a tied `lm_head` counts once)."""
    return sum(out * inner for out, inner in linear_shapes(spec).values())


def model_bits_per_weight(spec: ModelSpec, resolved: Mapping[str, Precision]) -> float:
    """Mean bits over all modules a recipe speaks of, scales and zero points included."""
    return _mean_bits(linear_shapes(spec), resolved)


def decoder_bits_per_weight(spec: ModelSpec, resolved: Mapping[str, Precision]) -> float:
    """Mean bits over the linear modules of the decoder layers: what recipes of equal size are compared by."""
    decoder = {name: shape for name, shape in linear_shapes(spec).items() if in_decoder(name)}
    return _mean_bits(decoder, resolved)


def _mean_bits(shapes: Mapping[str, tuple[int, int]], resolved: Mapping[str, Precision]) -> float:
    bits = sum(out * inner * resolved[name].bits_per_weight(inner) for name, (out, inner) in shapes.items())
    return round(bits / sum(out * inner for out, inner in shapes.values()), 4)


def preset(name: str, spec: ModelSpec) -> Recipe:
    """A built-in recipe: `f16`, `int8`, or `int4` (embeddings, lm_head, first and last layer int8, the rest int4-g128).

    Raises:
        RecipeError: unknown name.
    """
    if name in ("f16", "int8"):
        return Recipe(name=name, rules=(("*", Precision.parse(name)),))
    if name == "int4":
        high = ("model.embed_tokens", "lm_head", "model.layers.0.*", f"model.layers.{spec.num_layers - 1}.*")
        rules = tuple((pattern, INT8) for pattern in high)
        return Recipe(name=name, rules=(*rules, ("*", Precision.parse("int4-g128"))))
    raise RecipeError(f"unknown precision preset {name!r}", f"allowed: {', '.join(PRESETS)}")


def default_preset(spec: ModelSpec) -> str:
    """int8 for models under a billion parameters, int4 above: small models lose most to four bits."""
    return "int8" if num_linear_parameters(spec) < 1_000_000_000 else "int4"


class _RuleFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    match: str
    precision: str


class _RecipeFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1]
    name: str
    rules: list[_RuleFile]


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from YAML.

    Raises:
        RecipeError: the file is missing, not YAML, or not a recipe; the message names the field.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        parsed = _RecipeFile.model_validate(raw)
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}", "check --recipe") from None
    except (UnicodeDecodeError, yaml.YAMLError, ValidationError, RecursionError) as error:
        reason = _describe_invalid(error) if isinstance(error, ValidationError) else error
        raise RecipeError(f"{path} is not a recipe: {reason}", "see docs/build.md for the form") from None
    rules = []
    for rule in parsed.rules:
        try:
            rules.append((rule.match, Precision.parse(rule.precision)))
        except RecipeError as error:
            raise RecipeError(f"{path}, rule {rule.match!r}: {error.message}", error.hint) from None
    return Recipe(name=parsed.name, rules=tuple(rules))


def _describe_invalid(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())


def dump_recipe(recipe: Recipe) -> str:
    """The YAML text that `load_recipe` reads back to the same recipe."""
    rules = [{"match": pattern, "precision": str(precision)} for pattern, precision in recipe.rules]
    return yaml.safe_dump({"version": 1, "name": recipe.name, "rules": rules}, sort_keys=False)


def summarize(resolved: Mapping[str, Precision]) -> dict[str, int]:
    """Number of modules per precision, in the order first seen."""
    counts: dict[str, int] = {}
    for precision in resolved.values():
        counts[str(precision)] = counts.get(str(precision), 0) + 1
    return counts

"""What calibration decides about: linear modules that get one precision, and those that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.recipe import INT8, Precision, Recipe, fused_groups, in_decoder, is_routed_expert, linear_shapes
from harness.spec import ModelSpec

_FIRST_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules that get one precision, by Hugging Face name, and how many weights they hold.

    `patterns`: what a recipe's rules call them. `shapes`: `(out, in)` of each module. `portable`: whether the
    checkpoint is to be one that every arch and server reads.
    """

    name: str
    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    portable: bool = False

    @property
    def layers(self) -> frozenset[int]:
        """Numbers of the layers it has modules in."""
        return frozenset(layer_of(module) for module in self.modules)

    @property
    def num_weights(self) -> int:
        """Weights of all modules."""
        return sum(out * inner for out, inner in self.shapes)

    def fit(self, precision: Precision) -> Precision:
        """What a recipe asks for instead of `precision`, where a portable checkpoint cannot hold that.

        int4 over inputs that no group of 64 or 128 divides becomes int8, and routed experts, which are all of one
        scheme, get the group that divides all of their inputs.
        """
        if not self.portable or not is_portable_int4(precision):
            return precision
        fitted = {precision.fit(inner) for _, inner in self.shapes}
        if not all(map(is_portable_int4, fitted)):
            return INT8
        return precision if len(fitted) == 1 else min(fitted, key=lambda p: p.group_size or 0)

    def bits(self, precision: Precision) -> float:
        """Bits to store the unit, scales and zero points included."""
        fitted = self.fit(precision)
        return sum(out * inner * fitted.fit(inner).bits_per_weight(inner) for out, inner in self.shapes)


def layer_of(module: str) -> int:
    """Number of the decoder layer of `model.layers.N.*`."""
    return int(module.split(".")[2])


def layer_modules(spec: ModelSpec, layer: int) -> list[str]:
    """Linear modules of one decoder layer that are quantized, in model order."""
    return [m for m in linear_shapes(spec) if m.startswith(f"model.layers.{layer}.")]


def input_key(module: str) -> str:
    """A name for the input of a module; modules of one key see the same activations."""
    parent, _, kind = module.rpartition(".")
    if kind in _FIRST_PROJECTIONS:
        return f"{parent}.first"
    return f"{parent}.gate_up" if kind in ("gate_proj", "up_proj") else module


def by_input(modules: Sequence[str]) -> dict[str, list[str]]:
    """Modules by the input they share, in order."""
    keys: dict[str, list[str]] = {}
    for module in modules:
        keys.setdefault(input_key(module), []).append(module)
    return keys


def is_portable_int4(precision: Precision) -> bool:
    """Whether transformers, vLLM, SGLang and every arch read this form of int4."""
    return precision.dtype == "int4" and precision.symmetric and precision.group_size in (64, 128)


def portable_recipe(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """A recipe with rules before its own for units of which a portable checkpoint cannot hold what it asks for."""
    rules: list[tuple[str, Precision]] = []
    for unit in decision_units(spec, portable=True):
        asked = {recipe.precision_of(module) for module in unit.modules}
        fitted, *others = {unit.fit(precision) for precision in asked}
        if not others and asked != {fitted}:
            rules += [(pattern, fitted) for pattern in unit.patterns]
    return Recipe(name=recipe.name, rules=(*rules, *recipe.rules))


def decision_units(spec: ModelSpec, *, portable: bool) -> list[Unit]:
    """All units of a model, in model order.

    q, k and v are one; gate and up are one; all routed experts of a layer are one, and in a `portable` checkpoint those
    of all layers, because transformers, vLLM and SGLang read the experts of a checkpoint by one scheme.
    """
    shapes = linear_shapes(spec)
    members: dict[str, list[str]] = {}
    fused = {module: group[0] for group in fused_groups(spec) for module in group}
    for module in shapes:
        if not in_decoder(module):
            continue
        key = fused.get(module, module)
        if is_routed_expert(module):
            key = "experts" if portable else f"model.layers.{layer_of(module)}.mlp.experts"
        members.setdefault(key, []).append(module)
    return [_unit(key, modules, shapes, portable) for key, modules in members.items()]


def _unit(key: str, modules: list[str], shapes: dict[str, tuple[int, int]], portable: bool) -> Unit:
    kinds = [module.rpartition(".")[2].removesuffix("_proj") for module in modules]
    if key == "experts":
        name, patterns = "experts of all layers", ["model.layers.*.mlp.experts.*"]
    elif key.endswith(".experts"):
        name, patterns = key, [f"{key}.*"]
    else:
        name = f"{modules[0].rpartition('.')[0]}.{'+'.join(kinds)}"
        patterns = modules
    return Unit(
        name=name,
        modules=tuple(modules),
        patterns=tuple(patterns),
        shapes=tuple(shapes[module] for module in modules),
        portable=portable,
    )

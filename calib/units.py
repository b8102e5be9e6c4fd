"""What calibration decides about: linear modules that get one precision, and those that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.recipe import Precision, fused_groups, in_decoder, is_routed_expert, linear_shapes
from harness.spec import ModelSpec

_FIRST_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules that get one precision, by Hugging Face name, and how many weights they hold.

    `patterns`: what a recipe's rules call them. `shapes`: `(out, in)` of each module.
    """

    name: str
    modules: tuple[str, ...]
    patterns: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def layers(self) -> frozenset[int]:
        """Numbers of the layers it has modules in."""
        return frozenset(layer_of(module) for module in self.modules)

    @property
    def num_weights(self) -> int:
        """Weights of all modules."""
        return sum(out * inner for out, inner in self.shapes)

    def bits(self, precision: Precision) -> float:
        """Bits to store the unit, scales and zero points included."""
        return sum(out * inner * precision.fit(inner).bits_per_weight(inner) for out, inner in self.shapes)


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


def decision_units(spec: ModelSpec, *, experts_together: bool) -> list[Unit]:
    """All units of a model, in model order.

    q, k and v are one; gate and up are one; all routed experts of a layer are one, and with `experts_together` those of
    all layers, because transformers reads the experts of a checkpoint by one scheme.
    """
    shapes = linear_shapes(spec)
    members: dict[str, list[str]] = {}
    fused = {module: group[0] for group in fused_groups(spec) for module in group}
    for module in shapes:
        if not in_decoder(module):
            continue
        key = fused.get(module, module)
        if is_routed_expert(module):
            key = "experts" if experts_together else f"model.layers.{layer_of(module)}.mlp.experts"
        members.setdefault(key, []).append(module)
    return [_unit(key, modules, shapes) for key, modules in members.items()]


def portable_int4(spec: ModelSpec) -> Precision:
    """int4 in groups of 128, or of 64 where 128 does not divide the inputs of all routed experts.

    transformers, vLLM and SGLang read the experts of a checkpoint by one scheme, so that they cannot differ in this.
    """
    widths = {inner for module, (_, inner) in linear_shapes(spec).items() if is_routed_expert(module)}
    return Precision(dtype="int4", group_size=64 if any(width % 128 for width in widths) else 128)


def _unit(key: str, modules: list[str], shapes: dict[str, tuple[int, int]]) -> Unit:
    kinds = [module.rpartition(".")[2].removesuffix("_proj") for module in modules]
    if key == "experts":
        name, patterns = "experts of all layers", ["model.layers.*.mlp.experts.*"]
    elif key.endswith(".experts"):
        name, patterns = key, [f"{key}.*"]
    else:
        name = f"{modules[0].rpartition('.')[0]}.{'+'.join(kinds)}"
        patterns = modules
    return Unit(
        name=name, modules=tuple(modules), patterns=tuple(patterns), shapes=tuple(shapes[module] for module in modules)
    )

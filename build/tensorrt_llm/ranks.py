"""How a model is divided over ranks, as TensorRT-LLM 1.2.1 divides it (`mapping.py`, `layers/attention.py`).

Rank `stage * tp_size + tp_rank` holds the layers of a stage and, of each of their matrices, a share: outputs of those
that come first (column parallel), inputs of those that come second (row parallel). Where there are more ranks than key
and value heads, several ranks hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from harness.errors import UsageError
from harness.manifest import MOST_RANKS
from harness.spec import GqaSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """`tp_size` ranks share each layer, `pp_size` groups of them share the layers."""

    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        for flag, value in (("--tp", self.tp_size), ("--pp", self.pp_size)):
            if not 1 <= value <= MOST_RANKS:
                raise UsageError(f"{flag} is {value}", f"allowed: 1 to {MOST_RANKS}")

    @property
    def num_ranks(self) -> int:
        """How many GPUs."""
        return self.tp_size * self.pp_size

    def stages(self, num_layers: int) -> list[range]:
        """The layers of each stage; where they do not divide evenly, the first stages have one more."""
        least, more = divmod(num_layers, self.pp_size)
        starts = [stage * least + min(stage, more) for stage in range(self.pp_size + 1)]
        return [range(start, stop) for start, stop in pairwise(starts)]

    def share(self, size: int, tp_rank: int) -> slice:
        """The part of an axis that a rank holds, padded up to a multiple of the ranks where it is none."""
        part = -(-size // self.tp_size)
        return slice(tp_rank * part, (tp_rank + 1) * part)

    def kv_heads(self, num_kv_heads: int, tp_rank: int) -> range:
        """The key and value heads of a rank."""
        if num_kv_heads >= self.tp_size:
            part = num_kv_heads // self.tp_size
            return range(tp_rank * part, (tp_rank + 1) * part)
        head = tp_rank * num_kv_heads // self.tp_size
        return range(head, head + 1)


def check_ranks(spec: ModelSpec, ranks: Ranks) -> None:
    """Refuse a number of ranks that a model cannot be divided over.

    Raises:
        UsageError: names the sizes.
    """
    tp_size, a = ranks.tp_size, spec.attention
    kv_heads = a.num_kv_heads if isinstance(a, GqaSpec) else tp_size
    wholes = {"attention heads": a.num_heads, "rows of an MLP": spec.intermediate_size}
    if spec.moe is not None:
        wholes["rows of an expert"] = spec.moe.moe_intermediate_size
    for what, size in wholes.items():
        if size % tp_size:
            raise UsageError(f"--tp {tp_size} does not divide {size} {what}", "give another --tp")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise UsageError(
            f"--tp {tp_size} neither divides {kv_heads} key and value heads nor is a multiple of them",
            "give another --tp",
        )
    if ranks.pp_size > spec.num_layers:
        raise UsageError(
            f"--pp {ranks.pp_size} is more than the model's {spec.num_layers} layers", "give a smaller --pp"
        )

"""Rotary position embedding: its frequencies, and the ways they are stretched for longer contexts.

Owns the numbers, not how they are applied. Sources: RoPE (arXiv 2104.09864), position interpolation (2306.15595), YaRN
(2309.00071), Llama 3.1's release.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def check_positive(spec: object, *names: str) -> None:
    """Refuse attributes of a specification that are not above zero and finite.

    Raises:
        ValueError: names the first one.
    """
    for name in names:
        value = getattr(spec, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; allowed: above 0")


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        check_positive(self, "factor")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor is {self.high_freq_factor}; allowed: above {self.low_freq_factor}")


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) with DeepSeek's `mscale` pair."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN, eq. 22: `0.1 * mscale * ln(factor) + 1`, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over `dim` values a head; `interleaved`: pairs are neighbours (DeepSeek), not halves."""

    theta: float
    dim: int
    interleaved: bool = False
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self) -> None:
        if not (self.theta > 1 and math.isfinite(self.theta)):
            raise ValueError(f"rope_theta is {self.theta}; allowed: above 1")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"{self.dim} values of a head are rotated; allowed: an even number")

    def inv_freq(self) -> npt.NDArray[np.float32]:
        """Scaled inverse frequencies, shape `(dim / 2,)`."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        base: npt.NDArray[np.float32] = np.asarray(1.0 / np.power(np.float32(self.theta), exponents), dtype=np.float32)
        match self.scaling:
            case None:
                return base
            case LinearScaling(factor=factor):
                return np.asarray(base / np.float32(factor), dtype=np.float32)
            case Llama3Scaling() as s:
                return _llama3_inv_freq(base, s)
            case YarnScaling() as s:
                return _yarn_inv_freq(base, s, self.theta, self.dim)

    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by (YaRN's attention factor; 1 otherwise)."""
        if not isinstance(self.scaling, YarnScaling):
            return 1.0
        s = self.scaling
        if s.attention_factor is not None:
            return s.attention_factor
        if s.mscale and s.mscale_all_dim:
            return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
        return yarn_mscale(s.factor)


def _llama3_inv_freq(base: npt.NDArray[np.float32], s: Llama3Scaling) -> npt.NDArray[np.float32]:
    wavelength = 2 * math.pi / base
    low = s.original_max_position_embeddings / s.low_freq_factor
    high = s.original_max_position_embeddings / s.high_freq_factor
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    ramp = (1 - smooth) * base / s.factor + smooth * base
    scaled = np.where(wavelength > low, base / s.factor, np.where(wavelength < high, base, ramp))
    return scaled.astype(np.float32)


def _yarn_inv_freq(base: npt.NDArray[np.float32], s: YarnScaling, theta: float, dim: int) -> npt.NDArray[np.float32]:
    def correction_dim(num_rotations: float) -> float:
        span = s.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    low, high = correction_dim(s.beta_fast), correction_dim(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return np.asarray(base / s.factor * interpolated + base * (1 - interpolated), dtype=np.float32)

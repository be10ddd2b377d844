"""Tables of cosines and sines for rotary positions: default, linear, Llama 3 and YaRN scaling.

R rotary channels, P positions. All in float32, in the order of operations of the published models, so that the numbers
are the same to the last bit.
"""

from __future__ import annotations

import math

import torch

from .config import RotaryConfig


def make_cos_sin(config: RotaryConfig, num_positions: int) -> torch.Tensor:
    """`[P, R]`: R / 2 cosines, then R / 2 sines, times YaRN's attention factor."""
    frequencies, attention_factor = inverse_frequencies(config)
    angles_PR = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles_PR.cos() * attention_factor, angles_PR.sin() * attention_factor), dim=-1)


def inverse_frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """`[R / 2]` angles per position, and the factor on cosines and sines."""
    match config.rope_type:
        case "default":
            return _plain(config), 1.0
        case "linear":
            assert config.factor is not None
            return _plain(config) / config.factor, 1.0
        case "llama3":
            return _llama3(config), 1.0
        case "yarn":
            return _yarn(config), _yarn_attention_factor(config)
    raise AssertionError(config.rope_type)


def _exponents(config: RotaryConfig) -> torch.Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim


def _plain(config: RotaryConfig) -> torch.Tensor:
    return 1.0 / (config.theta ** _exponents(config))


def _llama3(config: RotaryConfig) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = config.factor, config.low_freq_factor or 1.0, config.high_freq_factor or 4.0
    original = config.original_max_position_embeddings
    assert factor is not None and original is not None
    plain = _plain(config)
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, blended, stretched)


def _yarn(config: RotaryConfig) -> torch.Tensor:
    """Frequencies between `beta_fast` and `beta_slow` rotations over the original length are blended
    (arXiv:2309.00071).
    """
    assert config.factor is not None
    positions = config.theta ** _exponents(config)
    kept, stretched = 1.0 / positions, 1.0 / (config.factor * positions)
    low, high = _yarn_range(config)
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    share_kept = 1 - ramp
    return stretched * (1 - share_kept) + kept * share_kept


def _yarn_range(config: RotaryConfig) -> tuple[float, float]:
    low, high = _channel_with(config, config.beta_fast), _channel_with(config, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _channel_with(config: RotaryConfig, num_rotations: float) -> float:
    """The channel that turns this often over the original length."""
    assert config.original_max_position_embeddings is not None
    turns = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
    return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))


def _yarn_attention_factor(config: RotaryConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    assert config.factor is not None
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

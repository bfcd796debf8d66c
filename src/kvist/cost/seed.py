"""First guesses of the time models: fitted profiles where there are any, else the roofline.

Profiles are least-squares fits to AIConfigurator's times of Llama-3.1-70B, BF16, TP 8 (72 points;
within 4 % in prefill, 13 % in decode). The roofline is the model's FLOPs and bytes over what the
device reaches of its data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware
from kvist.cost.lookup import normal
from kvist.cost.model import ModelShape
from kvist.cost.prefill import PrefillCoefficients

_PASS_S = 0.001  # scheduling and launches that no roofline knows
_SEQUENCE_S = 2e-5  # sampling and bookkeeping of one sequence in a step


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients fitted to one model on one kind of hardware, and where they are from."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    source: str


def _profile(prefill: tuple[float, float, float], decode: tuple[float, float, float]) -> Profile:
    """Milliseconds, as published, to seconds."""
    a, b, c = (v * 1e-3 for v in prefill)
    d0, d1, d2 = (v * 1e-3 for v in decode)
    return Profile(
        PrefillCoefficients(a, b, c),
        DecodeCoefficients(d0, d1, d2),
        "fit to AIConfigurator, Llama-3.1-70B BF16 TP 8",
    )


_A100 = _profile((30.7, 0.0920, 9.27e-7), (17.8, 0.062, 2.57e-5))
_H100 = _profile((6.3, 0.0384, 2.50e-7), (10.2, 0.018, 1.34e-5))
_H200 = _profile((4.4, 0.0379, 2.54e-7), (8.3, 0.020, 9.9e-6))
PROFILES = {
    ("llama-3-70b", "a100", 8): _A100,
    ("llama-3-70b", "a800", 8): _A100,  # the same but for NVLink
    ("llama-3-70b", "h100", 8): _H100,
    ("llama-3-70b", "h800", 8): _H100,
    ("llama-3-70b", "h200", 8): _H200,
}


def profile(model: ModelShape, hardware: Hardware) -> Profile | None:
    """The fitted profile of this model on this hardware, if there is one."""
    return PROFILES.get((normal(model.name), hardware.device.name, hardware.count))


def prefill_seed(model: ModelShape, hardware: Hardware) -> PrefillCoefficients:
    """Prefill coefficients before anything was observed."""
    fitted = profile(model, hardware)
    if fitted:
        return fitted.prefill.scaled(hardware.time_scale)
    return prefill_roofline(model, hardware)


def decode_seed(model: ModelShape, hardware: Hardware) -> DecodeCoefficients:
    """Decode coefficients before anything was observed."""
    fitted = profile(model, hardware)
    if fitted:
        return fitted.decode.scaled(hardware.time_scale)
    weight_share = model.parameters.active / max(1, model.parameters.total)
    weights_s = model.weight_bytes * weight_share / hardware.hbm_bytes_per_s
    # Each sequence of a batch of a mixture of experts wakes other experts; its windows are read.
    windows_s = model.constant_bytes / hardware.hbm_bytes_per_s
    compute_s = 2.0 * model.parameters.active / hardware.flops_per_s
    return DecodeCoefficients(
        d0_s=weights_s + _PASS_S * hardware.time_scale,
        d1_s=windows_s + compute_s + _SEQUENCE_S * hardware.time_scale,
        d2_s=model.token_bytes / hardware.hbm_bytes_per_s,
    )


def prefill_roofline(model: ModelShape, hardware: Hardware) -> PrefillCoefficients:
    """Prefill coefficients from FLOPs; a pass reads all weights once."""
    return PrefillCoefficients(
        a_s=model.weight_bytes / hardware.hbm_bytes_per_s + _PASS_S * hardware.time_scale,
        b_s=model.linear_flops / hardware.flops_per_s,
        c_s=model.quadratic_flops / hardware.flops_per_s,
    )

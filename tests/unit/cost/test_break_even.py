"""Devices, seeds and break-even: the published figures, and the tables of the workload research."""

from __future__ import annotations

import math

import pytest

from kvist.core.errors import ConfigError, UnsupportedError
from kvist.cost.break_even import (
    Prices,
    break_even_bytes_per_s,
    break_even_tokens,
    keep_s,
    mooncake_break_even_bytes_per_s,
)
from kvist.cost.catalogue import model
from kvist.cost.device import DEVICES, Hardware, device
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.seed import decode_seed, prefill_roofline, prefill_seed, profile

LENGTHS = (1024, 4096, 16384, 65536, 131072)
BANDWIDTHS = [
    ("Llama-2-7B", 1, "a100", (5.9, 5.6, 4.6, 2.7, 1.7)),
    ("Llama-2-7B", 1, "h100", (18.9, 17.8, 14.6, 8.5, 5.4)),
    ("Llama-2-7B", 1, "h20", (2.8, 2.7, 2.2, 1.3, 0.8)),
    ("Llama-3-8B", 1, "a100", (1.3, 1.2, 1.0, 0.6, 0.4)),
    ("Llama-3-8B", 1, "h100", (4.0, 3.8, 3.2, 1.9, 1.3)),
    ("Llama-3-70B", 8, "a100", (2.9, 2.8, 2.5, 1.8, 1.3)),
    ("Llama-3-70B", 8, "h100", (9.1, 8.8, 8.0, 5.7, 4.1)),
    ("Llama-3-70B", 8, "h20", (1.4, 1.3, 1.2, 0.9, 0.6)),
    ("Qwen3-30B-A3B", 1, "a100", (2.2, 1.9, 1.2, 0.5, 0.3)),
    ("Qwen3-30B-A3B", 1, "h100", (6.9, 5.9, 3.7, 1.5, 0.8)),
    ("Qwen3-235B-A22B", 8, "a100", (5.3, 4.8, 3.5, 1.7, 1.0)),
    ("Qwen3-235B-A22B", 8, "h100", (16.7, 15.1, 11.0, 5.3, 3.1)),
    ("DeepSeek-V3", 16, "h100", (7.3, 6.6, 4.8, 2.3, 1.4)),
    ("DeepSeek-V3", 16, "h20", (1.1, 1.0, 0.7, 0.3, 0.2)),
]
# GB/s and ms: PCIe 4, PCIe 5, one NVMe, four, 100 GbE, 25 GbE, object store.
PATHS = ((24, 0.5), (50, 0.5), (6.5, 2), (26, 2), (11.5, 2), (2.5, 5), (1, 50))
TOKENS = [
    ("Llama-3-8B", 1, "a100", (8, 8, 24, 20, 22, 99, 18e3)),
    ("Llama-3-8B", 1, "h100", (19, 17, 161, 73, 95, 38e3, 186e3)),
    ("Llama-2-7B", 1, "h100", (92, 30, 101e3, 276, 35e3, 344e3, 938e3)),
    ("Llama-3-70B", 8, "a100", (8, 8, 32, 20, 24, 17e3, 205e3)),
    ("Llama-3-70B", 8, "h100", (23, 17, 45e3, 87, 274, 288e3, 881e3)),
]


@pytest.mark.parametrize(("name", "gbs"), [("a800", 5.9), ("h800", 18.6)])
def test_break_even_bandwidth_is_that_of_mooncake_equation_2(name: str, gbs: float) -> None:
    peak = Hardware(device(name), 8).peak_flops_per_s
    found = mooncake_break_even_bytes_per_s(
        peak, hidden=8192, heads_per_kv_head=8, prefix_tokens=8192
    )
    assert round(found / 1e9, 1) == gbs


@pytest.mark.parametrize(("name", "count", "chip", "expected"), BANDWIDTHS)
def test_break_even_bandwidths_are_those_of_the_research_table(
    name: str, count: int, chip: str, expected: tuple[float, ...]
) -> None:
    shape, hardware = model(name), Hardware(device(chip), count)
    for tokens, gbs in zip(LENGTHS, expected, strict=True):
        compute_s = shape.prefill_flops(tokens, 0) / hardware.flops_per_s
        found = break_even_bytes_per_s(shape, tokens, compute_s)
        assert found / 1e9 == pytest.approx(gbs, abs=0.08)


@pytest.mark.parametrize(("name", "count", "chip", "expected"), TOKENS)
def test_break_even_lengths_are_those_of_the_research_table(
    name: str, count: int, chip: str, expected: tuple[float, ...]
) -> None:
    """The table's lengths start at 8. Lengths that come of a cancellation are sensitive."""
    shape = model(name)
    roofline = prefill_roofline(shape, Hardware(device(chip), count))
    for (gbs, ms), tokens in zip(PATHS, expected, strict=True):
        found = break_even_tokens(shape.token_bytes, gbs * 1e9, ms / 1e3, roofline)
        assert max(8.0, found) == pytest.approx(tokens, rel=0.03, abs=0.6)


def test_break_even_length_solves_its_equation_and_has_limits() -> None:
    times = PrefillCoefficients(0, 1e-4, 1e-9)
    for bandwidth in (1e8, 1e9, 1e10):
        p = break_even_tokens(131072, bandwidth, 0.002, times)
        assert 1e-4 * p + 1e-9 * p * p == pytest.approx(0.002 + p * 131072 / bandwidth)
    assert break_even_tokens(131072, 0, 0.002, times) == math.inf
    flat = PrefillCoefficients(0, 1e-4, 0)
    assert break_even_tokens(131072, 1e9, 0.002, flat) == math.inf
    assert break_even_tokens(131072, 1e10, 0.002, flat) == pytest.approx(
        0.002 / (1e-4 - 131072 / 1e10)
    )


@pytest.mark.parametrize(
    ("name", "count", "chip", "dollars", "expected"),
    [
        ("Llama-3-70B", 8, "h200", 3.0, (600, 5.5 * 3600, 26 * 3600)),
        ("Llama-3-8B", 1, "h100", 2.5, (120, 69 * 60, 5.4 * 3600)),
    ],
)
def test_five_minute_rule_gives_minutes_for_dram_and_hours_for_disk(
    name: str, count: int, chip: str, dollars: float, expected: tuple[float, ...]
) -> None:
    shape, hardware = model(name), Hardware(device(chip), count)
    token_s = shape.prefill_flops(8192, 0) / hardware.flops_per_s / 8192
    for price, seconds in zip((0.005, 0.00015, 0.000032), expected, strict=True):
        found = keep_s(shape.token_bytes, token_s, count, Prices(dollars, price))
        assert found == pytest.approx(seconds, rel=0.2)


def test_128k_prefill_on_8_a100_falls_from_28_to_2_seconds_with_a_95_percent_prefix() -> None:
    times = prefill_seed(model("Llama-3-70B"), Hardware(device("a100"), 8))
    n, p = 131072, int(131072 * 0.95)
    whole, rest = times.prefill_s(n, 0), times.prefill_s(n - p, p)
    assert whole == pytest.approx(28.2, rel=0.01)
    assert rest == pytest.approx(2.2, rel=0.01)
    assert 1 - rest / whole == pytest.approx(0.92, abs=0.005)


@pytest.mark.parametrize(
    ("chip", "seconds"),
    [
        ("a100", (0.126, 0.424, 0.832, 1.79, 4.06, 10.1, 28.2)),
        ("h100", (0.046, 0.170, 0.344, 0.690, 1.54, 3.56, 9.31)),
        ("h200", (0.045, 0.165, 0.334, 0.705, 1.49, 3.57, 9.33)),
    ],
)
def test_profiles_are_within_five_percent_of_aiconfigurator(
    chip: str, seconds: tuple[float, ...]
) -> None:
    times = prefill_seed(model("Llama-3-70B"), Hardware(device(chip), 8))
    for power, expected in zip((10, 12, 13, 14, 15, 16, 17), seconds, strict=True):
        assert times.prefill_s(2**power, 0) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("chip", ["a100", "h100", "h200"])
def test_roofline_is_within_a_factor_of_two_of_the_profiles(chip: str) -> None:
    shape, hardware = model("Llama-3-70B"), Hardware(device(chip), 8)
    fitted, guessed = prefill_seed(shape, hardware), prefill_roofline(shape, hardware)
    for tokens in LENGTHS:
        assert 0.5 < guessed.prefill_s(tokens, 0) / fitted.prefill_s(tokens, 0) < 2
    steps = decode_seed(shape, hardware)
    other = decode_seed(model("Qwen2.5-72B"), hardware)
    assert profile(model("Qwen2.5-72B"), hardware) is None
    for batch in (1, 16, 64):
        context = batch * 4096
        ratio = other.decode_s(batch, context) / steps.decode_s(batch, context)
        assert 0.4 < ratio < 2


@pytest.mark.parametrize("chip", sorted(DEVICES))
def test_every_device_seeds_every_kind_of_model(chip: str) -> None:
    for name in ("Llama-3-8B", "DeepSeek-V3", "gpt-oss-120b", "Qwen3.5-397B"):
        prefill = prefill_seed(model(name), Hardware(device(chip), 16))
        decode = decode_seed(model(name), Hardware(device(chip), 16))
        assert 0 < prefill.prefill_s(1000, 0) < prefill.prefill_s(1000, 100000) < math.inf
        assert 0 < decode.decode_s(1, 1000) < decode.decode_s(64, 64000) < math.inf
        assert device(chip).source


def test_a_time_scale_multiplies_every_seeded_time() -> None:
    for name in ("Llama-3-70B", "Qwen3-8B"):
        plain = prefill_seed(model(name), Hardware(device("h100"), 8))
        slow = prefill_seed(model(name), Hardware(device("h100"), 8, time_scale=1.9))
        assert slow.prefill_s(5000, 100) == pytest.approx(1.9 * plain.prefill_s(5000, 100))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("NVIDIA H100-SXM5-80GB", "h100"), ("Ascend 910B", "ascend-910b"), ("AMD MI300X", "mi300x"),
     ("910b", "ascend-910b"), ("A100-PCIE", "a100")],
)  # fmt: skip
def test_devices_are_found_as_people_spell_them(spelling: str, name: str) -> None:
    assert device(spelling).name == name


def test_impossible_hardware_is_one_clear_line() -> None:
    with pytest.raises(UnsupportedError, match="did you mean h100"):
        device("h10")
    with pytest.raises(UnsupportedError, match="unknown device 'abacus'; known: a100"):
        device("abacus")
    with pytest.raises(ConfigError, match=r"\$\.hardware\.count: must be at least 1"):
        Hardware(device("h100"), 0)
    with pytest.raises(ConfigError, match="above 0"):
        Hardware(device("h100"), 1, time_scale=math.nan)
    with pytest.raises(ConfigError, match=r"\$\.prices\.gb_per_hour"):
        Prices(1.0, 0.0)

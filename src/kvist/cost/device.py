"""Accelerators: what their data sheets promise, and the share of it that engines reach.

Figures are dense BF16 of one device (one core for `cpu`); `source` says where they are from. They
seed the time models only: what is observed soon replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.core.errors import ConfigError
from kvist.cost.lookup import find

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Rates are of the data sheet; the two ratios say what is reached of them.

    `compute_ratio` is the model FLOPs utilisation of a long prefill, `memory_ratio` the share of
    HBM bandwidth that reading weights and KV reaches.
    """

    name: str
    flops_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: int
    host_bytes_per_s: float
    nic_bytes_per_s: float
    source: str
    compute_ratio: float = 0.5
    memory_ratio: float = 0.8


@dataclass(frozen=True, slots=True)
class Hardware:
    """`count` devices that hold one replica of the model together.

    `time_scale` multiplies every seeded time: engines of 2023-24 took about 1.9 times what today's
    kernels take in prefill.

    Raises:
        ConfigError: a count below 1, or a scale that is not above 0.
    """

    device: Device
    count: int = 1
    time_scale: float = field(default=1.0)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"must be at least 1, not {self.count}", path="$.hardware.count")
        if not 0 < self.time_scale < float("inf"):
            raise ConfigError(f"must be above 0, not {self.time_scale}", path="$.hardware.scale")

    @property
    def peak_flops_per_s(self) -> float:
        return self.device.flops_per_s * self.count

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that a long prefill reaches."""
        return self.peak_flops_per_s * self.device.compute_ratio / self.time_scale

    @property
    def hbm_bytes_per_s(self) -> float:
        """Bytes/s that reading weights and KV reaches."""
        return self.device.hbm_bytes_per_s * self.count * self.device.memory_ratio / self.time_scale


def _device(
    name: str, tflops: float, hbm_gbs: float, hbm_gib: float, host_nic_gbs: tuple[float, float],
    source: str,
) -> Device:  # fmt: skip
    host, nic = host_nic_gbs
    return Device(
        name, tflops * 1e12, hbm_gbs * 1e9, int(hbm_gib * GIB), host * 1e9, nic * 1e9, source
    )


_SHEET = "data sheet"
_MEMORY = "data sheet, from memory"
_DEVICES = (
    # name, dense BF16 TFLOPS, HBM GB/s, HBM GiB, (host link GB/s, NIC GB/s a device), source.
    # Host links are one direction after protocol: PCIe 4 x16 24 GB/s, PCIe 5 x16 50 GB/s.
    _device("a100", 312, 2039, 80, (24, 25), f"{_SHEET} A100 80 GB SXM; 200 Gb/s a GPU"),
    _device("a800", 312, 2039, 80, (24, 12.5), f"{_SHEET} as A100, NVLink 400; 800 Gb/s a node"),
    _device("h100", 989, 3350, 80, (50, 50), f"{_SHEET} H100 SXM; 400 Gb/s a GPU"),
    _device("h800", 989, 3350, 80, (50, 50), f"{_MEMORY}: as H100, NVLink 400"),
    _device("h200", 989, 4800, 141, (50, 50), f"{_SHEET} H200 SXM"),
    _device("h20", 148, 4000, 96, (50, 50), f"{_MEMORY} H20"),
    _device("b200", 2250, 8000, 180, (50, 50), f"{_MEMORY} B200, dense"),
    _device("l40s", 362, 864, 48, (24, 25), f"{_MEMORY} L40S, dense"),
    _device("mi300x", 1307, 5300, 192, (50, 50), f"{_MEMORY} MI300X, dense"),
    _device("ascend-910b", 376, 1600, 64, (24, 25), f"{_MEMORY} Ascend 910B; variants differ"),
    # One core with 512-bit FMA at about 3 GHz, of a server with about 200 GB/s for 20 cores.
    _device("cpu", 0.1, 10, 8, (10, 1.25), "one server core, FP32; `count` is the number of cores"),
)
DEVICES = {d.name: d for d in _DEVICES}
_ALIASES = {"910b": "ascend-910b", "ascend910b": "ascend-910b"}
_SUFFIXES = ("-80gb", "-sxm", "-sxm4", "-sxm5", "-pcie", "-nvl")


def device(name: str) -> Device:
    """The catalogue's entry for `name` (`H100`, `NVIDIA H100-SXM`, `Ascend 910B`, ...).

    Raises:
        UnsupportedError: no such device; the line names the nearest.
    """
    spelt = name.lower().removeprefix("nvidia ").removeprefix("amd ").removeprefix("huawei ")
    spelt = spelt.strip().replace(" ", "-").replace("_", "-")
    for suffix in _SUFFIXES:
        spelt = spelt.removesuffix(suffix)
    remedy = f"known: {', '.join(DEVICES)}"
    known = _ALIASES.get(spelt, spelt)
    if known in DEVICES:
        return DEVICES[known]
    return find(name, DEVICES, what="device", path="$.hardware.device", remedy=remedy)

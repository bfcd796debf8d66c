"""What advice is asked for: model, hardware, prices, SSD, SLO, and how much work to put into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kvist.core.errors import ConfigError
from kvist.cost.break_even import Prices
from kvist.cost.decode import DecodeCoefficients
from kvist.cost.device import Hardware
from kvist.cost.model import ModelShape
from kvist.cost.prefill import PrefillCoefficients
from kvist.cost.transfer import PathSpeed
from kvist.sim.des.spec import ClusterSpec, LinkSpec, Slo

_USUAL_PER_HOUR = 2.0
# Dollars of one device an hour, rented by the year; assumptions, as clouds asked in 2025.
DEVICE_PER_HOUR = {
    "a100": 1.5,
    "a800": 1.5,
    "h100": 2.5,
    "h800": 2.5,
    "h200": 3.0,
    "h20": 1.2,
    "b200": 5.0,
    "l40s": 0.9,
    "mi300x": 2.5,
    "ascend-910b": 1.2,
    "cpu": 0.04,
}


def usual_price(device: str) -> float:
    """Dollars an hour that a device costs unless the user says otherwise."""
    return DEVICE_PER_HOUR.get(device, _USUAL_PER_HOUR)


class Medium(Enum):
    """A tier below HBM that can be bought."""

    DRAM = "dram"
    SSD = "ssd"


def _above_zero(value: float, path: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"must be above 0 and finite, not {value}", path=path)


@dataclass(frozen=True, slots=True)
class Market:
    """Dollars: a device an hour, a GB kept for an hour in DRAM and on SSD.

    Raises:
        ConfigError: a price that is not above 0.
    """

    device_per_hour: float
    dram_gb_per_hour: float = 0.005
    ssd_gb_per_hour: float = 0.00015

    def __post_init__(self) -> None:
        _above_zero(self.device_per_hour, "--device-price")
        _above_zero(self.dram_gb_per_hour, "--dram-price")
        _above_zero(self.ssd_gb_per_hour, "--ssd-price")

    def gb_per_hour(self, medium: Medium) -> float:
        """Dollars of a GB of `medium` kept for an hour."""
        return self.dram_gb_per_hour if medium is Medium.DRAM else self.ssd_gb_per_hour

    def prices(self, medium: Medium) -> Prices:
        """As the five-minute rule wants them."""
        return Prices(self.device_per_hour, self.gb_per_hour(medium))


@dataclass(frozen=True, slots=True)
class Disks:
    """The SSDs of one node together.

    Attributes:
        endurance_dwpd: drive writes a day that they are made for, over five years.
        dollars_per_tb: what a new drive costs, of which every write wears off a part.

    Raises:
        ConfigError: a value that is not above 0.
    """

    read_bytes_per_s: float = 26e9
    write_bytes_per_s: float = 12e9
    latency_s: float = 1e-4
    endurance_dwpd: float = 1.0
    dollars_per_tb: float = 120.0

    def __post_init__(self) -> None:
        _above_zero(self.read_bytes_per_s, "--ssd-bandwidth")
        _above_zero(self.write_bytes_per_s, "--ssd-bandwidth")
        _above_zero(self.latency_s, "$.disks.latency_s")
        _above_zero(self.endurance_dwpd, "--ssd-endurance")
        _above_zero(self.dollars_per_tb, "--drive-price")


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of the work: larger traces are sampled.

    Attributes:
        replay_accesses: most accesses to blocks of one replay.
        capacities: points of the hit curve.
        simulated_requests: most requests of the cluster simulation.
    """

    replay_accesses: int = 300_000
    capacities: int = 8
    simulated_requests: int = 3_000


QUICK = Effort(replay_accesses=60_000, capacities=6, simulated_requests=600)


@dataclass(frozen=True, slots=True)
class Question:
    """A deployment whose cache is to be judged.

    Attributes:
        nodes: replicas of the model; None for as few as the engine alone can do with.
        dram_bytes: DRAM of a node that comes with its devices and costs nothing more; None for
            as much as they have HBM.

    Raises:
        ConfigError: no nodes, or a model that does not fit the devices.
    """

    model: ModelShape
    hardware: Hardware
    market: Market
    disks: Disks = field(default_factory=Disks)
    slo: Slo = field(default_factory=lambda: Slo(ttft_s=10.0, tbt_s=0.2))
    nodes: int | None = None
    dram_bytes: int | None = None
    effort: Effort = field(default_factory=Effort)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"must be at least 1, not {self.nodes}", path="--nodes")
        if self.dram_bytes is not None and self.dram_bytes < 0:
            raise ConfigError("must be 0 or more", path="--host-dram")
        if self.model.token_bytes < 1:
            raise ConfigError(
                f"{self.model.name} keeps no KV a token: there is no prefix to cache",
                path="--model",
            )
        self.cluster()

    def cluster(self) -> ClusterSpec:
        """One node with nothing below HBM; the cost model's times and sizes."""
        links = LinkSpec(
            ssd_read_bytes_per_s=self.disks.read_bytes_per_s,
            ssd_write_bytes_per_s=self.disks.write_bytes_per_s,
            ssd_latency_s=self.disks.latency_s,
        )
        return ClusterSpec(self.model, self.hardware, links=links, slo=self.slo)

    @property
    def prefill(self) -> PrefillCoefficients:
        return self.cluster().prefill()

    @property
    def decode(self) -> DecodeCoefficients:
        return self.cluster().decode()

    @property
    def hbm_tokens(self) -> int:
        """Tokens of KV that the HBM of one node holds."""
        return self.cluster().hbm_tokens()

    @property
    def host_dram_bytes(self) -> int:
        """DRAM of a node that is there anyway."""
        if self.dram_bytes is not None:
            return self.dram_bytes
        return self.hardware.device.hbm_bytes * self.hardware.count

    @property
    def dollars_per_device_s(self) -> float:
        """What a second of one node costs."""
        return self.market.device_per_hour * self.hardware.count / 3600

    def path(self, medium: Medium) -> PathSpeed:
        """Latency and bandwidth from a medium of one node into its devices."""
        spec = self.cluster()
        host = PathSpeed(spec.links.host_latency_s, spec.host_bytes_per_s())
        if medium is Medium.DRAM:
            return host
        latency_s = self.disks.latency_s + host.latency_s
        return PathSpeed(latency_s, min(self.disks.read_bytes_per_s, host.bytes_per_s))

"""Every knob, typed and documented; where its value comes from; what it means on this machine."""

from kvist.config.knobs import Knob, knobs
from kvist.config.load import LoadedConfig, as_mapping, load_config, value_at
from kvist.config.preflight import (
    Machine,
    Problem,
    dram_bytes,
    preflight,
    read_machine,
    ssd_bytes,
    ssd_folder,
    ssd_folders,
)
from kvist.config.schema import (
    BreakerConfig,
    Config,
    ConnectorConfig,
    DramConfig,
    EventsConfig,
    NodeConfig,
    SsdConfig,
    StoreConfig,
)
from kvist.config.size import format_size, parse_size

__all__ = [
    "BreakerConfig",
    "Config",
    "ConnectorConfig",
    "DramConfig",
    "EventsConfig",
    "Knob",
    "LoadedConfig",
    "Machine",
    "NodeConfig",
    "Problem",
    "SsdConfig",
    "StoreConfig",
    "as_mapping",
    "dram_bytes",
    "format_size",
    "knobs",
    "load_config",
    "parse_size",
    "preflight",
    "read_machine",
    "ssd_bytes",
    "ssd_folder",
    "ssd_folders",
    "value_at",
]

"""Every knob, typed and documented; where its value comes from; what it means on this machine."""

from kvist.config.cluster_schema import (
    ClusterConfig,
    check_cluster,
    check_discovery,
    cluster_nodes,
)
from kvist.config.disaggregation_schema import DisaggregationConfig
from kvist.config.gateway_peers_schema import GatewayEventsConfig, GatewayPeersConfig
from kvist.config.gateway_schema import (
    GatewayConfig,
    GatewayLimitsConfig,
    GatewayTimeoutsConfig,
)
from kvist.config.knobs import Knob, knobs
from kvist.config.load import LoadedConfig, as_mapping, load_config, value_at
from kvist.config.peers_schema import (
    PeersConfig,
    check_peers,
    check_transport,
    peer_address,
    peer_members,
)
from kvist.config.preflight import (
    Machine,
    Problem,
    dram_bytes,
    preflight,
    read_machine,
    remote_answers,
    remote_codec,
    ssd_bytes,
    ssd_codec,
    ssd_folder,
    ssd_folders,
)
from kvist.config.router_schema import RouterConfig
from kvist.config.schema import Config, ConnectorConfig, EventsConfig, NodeConfig
from kvist.config.shown import without_password
from kvist.config.size import format_size, parse_size
from kvist.config.store_schema import (
    BreakerConfig,
    DramConfig,
    RemoteConfig,
    SsdConfig,
    StoreConfig,
)

__all__ = [
    "BreakerConfig",
    "ClusterConfig",
    "Config",
    "ConnectorConfig",
    "DisaggregationConfig",
    "DramConfig",
    "EventsConfig",
    "GatewayConfig",
    "GatewayEventsConfig",
    "GatewayLimitsConfig",
    "GatewayPeersConfig",
    "GatewayTimeoutsConfig",
    "Knob",
    "LoadedConfig",
    "Machine",
    "NodeConfig",
    "PeersConfig",
    "Problem",
    "RemoteConfig",
    "RouterConfig",
    "SsdConfig",
    "StoreConfig",
    "as_mapping",
    "check_cluster",
    "check_discovery",
    "check_peers",
    "check_transport",
    "cluster_nodes",
    "dram_bytes",
    "format_size",
    "knobs",
    "load_config",
    "parse_size",
    "peer_address",
    "peer_members",
    "preflight",
    "read_machine",
    "remote_answers",
    "remote_codec",
    "ssd_bytes",
    "ssd_codec",
    "ssd_folder",
    "ssd_folders",
    "value_at",
    "without_password",
]

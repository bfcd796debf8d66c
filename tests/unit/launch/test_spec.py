"""A cluster's file: what it may say, and one line for what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvist.config import PeersConfig, check_cluster, load_config
from kvist.core.errors import ConfigError
from kvist.launch.spec import ClusterSpec, EngineSpec, HostOrders, for_node, is_secret, read_spec


def _file(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    spec = read_spec(
        _file(
            tmp_path,
            """
name: chat
hosts: 2
cpus: 4
kvist:
  store:
    dram: {capacity: 8GiB}
engines:
  - model: org/model
    per_host: 2
    gpus: 1
    args: [--max-model-len, "8192"]
""",
        )
    )
    engine = EngineSpec(model="org/model", per_host=2, gpus=1, args=("--max-model-len", "8192"))
    kvist = {"store": {"dram": {"capacity": "8GiB"}}}
    assert spec == ClusterSpec(name="chat", hosts=2, cpus=4, kvist=kvist, engines=(engine,))
    assert spec.gpus == 2


def test_an_empty_file_is_a_node_on_every_host(tmp_path: Path) -> None:
    assert read_spec(_file(tmp_path, "")) == ClusterSpec()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("engines: [{modle: x}]", "$.engines[0]"),
        ("engines: [{model: x, port: 99999}]", "$.engines[0].port"),
        ("hosts: 0", "$.hosts"),
        ("hosts: some", "$.hosts"),
        ("nodes: 2", "unknown field `nodes`"),
        ("name: Größe", "$.name"),
        ("name: [", "is not YAML"),
        ("- a", "expected `object`"),
    ],
)
def test_each_fault_is_one_line_that_names_the_place(
    tmp_path: Path, text: str, wanted: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    line = str(caught.value)
    assert wanted in line
    assert str(path) in line
    assert "\n" not in line
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        read_spec(tmp_path / "absent.yaml")


def _orders(kvist: dict[str, Any], discovery: str = "") -> HostOrders:
    return HostOrders("chat", "abc", "", kvist, (), address="10.0.0.7", discovery=discovery)


def test_the_node_s_id_and_address_are_filled_into_every_text() -> None:
    tree = {"store": {"ssd": {"path": "/nvme/{node}"}, "paths": ["{node}/{address}", 3]}, "n": 1}
    assert for_node(_orders(tree)) == {
        "store": {"ssd": {"path": "/nvme/abc"}, "paths": ["abc/10.0.0.7", 3]},
        "n": 1,
    }
    assert tree["store"]["ssd"]["path"] == "/nvme/{node}"  # type: ignore[index]


def test_nodes_find_each_other_unless_the_file_says_how() -> None:
    found = for_node(_orders({"node": {"drain_s": 9}}, "10.0.0.1:6379/chat"))
    assert found["node"] == {
        "drain_s": 9,
        "peers": {"listen": "127.0.0.1:0"},
        "cluster": {"discovery": "ray", "url": "10.0.0.1:6379/chat", "name": "abc"},
    }
    check_cluster(load_config("/dev/null", {}, found).config.node.cluster, PeersConfig())
    reached = {
        "peers": {"listen": "{address}:0", "token_file": "/t"},
        "cluster": {"events": "tcp://{address}:0", "replicas": 1},
    }
    found = for_node(_orders({"node": reached}, "10.0.0.1:6379/chat"))
    assert found["node"]["peers"]["listen"] == "10.0.0.7:0"
    assert found["node"]["cluster"]["events"] == "tcp://10.0.0.7:0"
    assert found["node"]["cluster"]["discovery"] == "ray"
    for own in ({"cluster": {"discovery": "none"}}, {"peers": {"members": "127.0.0.1:1"}}):
        assert for_node(_orders({"node": own}, "10.0.0.1:6379/chat")) == {"node": own}
    assert for_node(_orders({})) == {}


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        ({}, False),
        ({"peers": {"token_file": ""}}, False),
        ({"peers": {"token_file": "/t"}}, True),
        ({"cluster": {"secret_file": "env:S"}}, True),
    ],
)
def test_hosts_trust_each_other_only_with_a_secret(node: dict[str, Any], wanted: bool) -> None:
    assert is_secret({"node": node}) is wanted
    assert not is_secret({})

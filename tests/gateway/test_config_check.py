"""`kvist config check` says of a gateway's configuration what `kvist gateway` would."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.cli.main import main

CHECK = ["config", "check", "--set=store.ssd.enabled=false", "--set=store.dram.capacity=16MiB"]


@pytest.mark.parametrize(
    ("sets", "path", "said"),
    [
        (["router.policy=nearest"], "router.policy", "unknown policy"),
        (["gateway.listen=0.0.0.0:80"], "gateway.listen", "not on loopback"),
        (["gateway.replicas=nowhere"], "gateway.replicas", "no URL of an engine"),
        (["gateway.operator_file=/nowhere"], "gateway.operator_file", "cannot read"),
        (["gateway.engine_key_file=/nowhere"], "gateway.engine_key_file", "cannot read"),
        (["gateway.tls.cert=/nowhere"], "gateway.tls.cert", "cannot be used"),
        (["gateway.peers.listen=tcp://0.0.0.0:1"], "gateway.peers.listen", "reached by others"),
    ],
    ids=["policy", "address", "engine", "operator", "engines' key", "certificate", "peers"],
)
def test_what_a_gateway_would_refuse_is_named(
    sets: list[str], path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, *(f"--set={knob}" for knob in sets)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"$.{path} (--set): ")
    assert said in line
    assert "; " in line


def test_key_of_a_tenant_is_named_with_the_file_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = tmp_path / "operator"
    operator.write_text("operator-0123456789")
    operator.chmod(0o600)
    file = tmp_path / "kvist.yaml"
    file.write_text(f"gateway: {{operator_file: {operator}, tenants: {{a: /nowhere}}}}\n")
    assert main([*CHECK, f"--config={file}"]) == 1
    assert capsys.readouterr().out.startswith(f"$.gateway.tenants.a ({file}): cannot read /nowhere")


def test_gateway_that_could_serve_passes(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["gateway.replicas=http://127.0.0.1:1", "router.policy=prefix"]
    assert main([*CHECK, *(f"--set={knob}" for knob in sets)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok"

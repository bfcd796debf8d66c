"""Redis over TLS: the same objects, and nothing for a server whose certificate is not trusted."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real import HOST, START_S, free_port, redis_server

from kvist.adapters.protocol import Got, NewObject, Put, StorageAdapter, Wanted
from kvist.core.errors import TierError

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl to make certificates"
)
BIG = bytes(range(256)) * 8192  # more than a record of TLS, and than a socket takes at once


def openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `ca.crt`, its `server.crt` and `server.key`, and the `other.crt` of no one."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for ca in ("ca", "other"):
        files = ["-keyout", f"{ca}.key", "-out", f"{ca}.crt", "-days", "2"]
        openssl(folder, "req", "-x509", *new, "-subj", f"/CN={ca}", *files)
    (folder / "san").write_text(f"subjectAltName=IP:{HOST},DNS:localhost\n")
    openssl(folder, "req", *new, "-subj", "/CN=n", "-keyout", "server.key", "-out", "server.csr")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    signed += ["-extfile", "san", "-out", "server.crt"]
    openssl(folder, "x509", "-req", "-in", "server.csr", *signed)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["server", "cluster"])
def place(request: pytest.FixtureRequest, certificates: Path) -> Iterator[str]:
    """The URL, but for the CA, by which a server, or a cluster of one, speaks TLS."""
    redis = pytest.importorskip("redis")
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificates / "server.crt")]
    options += ["--tls-key-file", str(certificates / "server.key")]
    options += ["--tls-ca-cert-file", str(certificates / "ca.crt")]
    options += ["--cluster-enabled", "yes", "--tls-cluster", "yes"] if request.param else []
    with redis_server(*options) as server:
        server.wait_for(port)
        if request.param:
            with redis.Redis(HOST, server.port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                until_s = time.monotonic() + START_S
                while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                    assert time.monotonic() < until_s, "the cluster does not begin"
        yield f"rediss{'+cluster' if request.param else ''}://{HOST}:{port}"


def opened(place: str, ca: Path) -> StorageAdapter:
    from kvist.adapters.redis import RedisAdapter

    return RedisAdapter(f"{place}?ssl_ca_certs={ca}", timeout_s=20.0)


def test_objects_go_there_and_come_back(place: str, certificates: Path) -> None:
    adapter = opened(place, certificates / "ca.crt")
    objects = [NewObject("a/1", (memoryview(BIG),)), NewObject("a/2", (memoryview(b"x"),))]
    assert adapter.put(objects).outcomes == (Put.STORED, Put.STORED)
    assert adapter.put(objects).outcomes == (Put.PRESENT, Put.PRESENT)
    big, small = bytearray(len(BIG)), bytearray(1)
    wanted = [Wanted("a/1", (memoryview(big),)), Wanted("a/2", (memoryview(small),))]
    assert [f.got for f in adapter.get([*wanted, Wanted("a/3", (memoryview(bytearray(1)),))])] == [
        Got.HIT,
        Got.HIT,
        Got.ABSENT,
    ]
    assert (bytes(big), bytes(small)) == (BIG, b"x")
    adapter.delete(["a/1", "a/2"])
    adapter.close()


def test_server_that_is_not_trusted_gets_nothing(place: str, certificates: Path) -> None:
    adapter = opened(place, certificates / "other.crt")
    with pytest.raises(TierError, match="certificate"):
        adapter.put([NewObject("a/1", (memoryview(BIG),))])
    adapter.close()

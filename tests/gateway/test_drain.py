"""`kvist gateway` as a process: it ends when its streams have ended, and another goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_thread import LIMIT_S, Running, alone, eventually, read_stream, serving, small_router

from kvist.cli.main import main
from kvist.testing.stub_engine import Pace, StubEngine

COMPLETIONS = "/v1/completions"
BODY = {"model": "stub", "prompt": "drain", "temperature": 0, "max_tokens": 60, "ignore_eos": True}


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], Running]]:
    """A gateway in a process of its own, and a client of it."""
    command = [sys.executable, "-m", "kvist.cli.main", "gateway", *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVIST_")}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("kvist: ready on http://"), child.communicate()
        yield child, Running(int(line.rsplit(":", 1)[1]), small_router(), lambda: None)
    finally:
        child.kill()
        child.communicate()


def test_restart_loses_no_stream_and_no_request() -> None:
    with (
        StubEngine(Pace(token_s=0.02)) as engine,
        process(engine.url, "--listen=127.0.0.1:0") as (first, client),
    ):
        expected = alone(engine, COMPLETIONS, BODY)
        with client.open(COMPLETIONS, BODY | {"stream": True}) as reply:
            assert reply.readline()
            first.send_signal(signal.SIGTERM)
            eventually(lambda: not listens(client))
            again = process(engine.url, f"--listen=127.0.0.1:{client.port}")
            with again as (second, other):
                assert other.ask(COMPLETIONS, BODY | {"max_tokens": 2})[0] == 200
                rest = read_stream(reply)
                second.send_signal(signal.SIGTERM)
                assert second.wait(LIMIT_S) == 0
        assert rest.done
        assert expected.text.endswith(rest.text)
        assert first.wait(LIMIT_S) == 0
        check_record(first, engine)


def check_record(gateway: subprocess.Popen[str], engine: StubEngine) -> None:
    """The last line that a gateway logged of a request says all of it."""
    assert gateway.stderr is not None
    lines = [line for line in gateway.stderr if '"request"' in line]
    record = json.loads(lines[-1].split(" INFO ", 1)[1])
    assert (record["outcome"], record["output_tokens"]) == ("ok", 60)
    assert record["replicas"] == [engine.url]
    (reason,) = record["reasons"]
    assert reason.startswith("kvist: queue 0.000 s, serve ")
    assert 0 < record["ttft_s"] < record["took_s"]


def listens(client: Running) -> bool:
    """Whether somebody takes connections there."""
    try:
        client.ask("/healthz")
    except ConnectionError:
        return False
    return True


def test_gateway_that_leaves_says_so_before_it_does() -> None:
    with StubEngine() as engine:
        options = (engine.url, "--listen=127.0.0.1:0", "--set=gateway.leave_s=30")
        with process(*options) as (child, client):
            assert client.ask("/readyz")[0] == 200
            child.send_signal(signal.SIGTERM)
            eventually(lambda: client.ask("/readyz")[0] == 503)
            assert client.ask(COMPLETIONS, BODY)[0] == 200
            child.send_signal(signal.SIGTERM)
            assert child.wait(LIMIT_S) == 0


def test_streams_that_do_not_end_in_time_are_cut() -> None:
    with StubEngine(Pace(token_s=1.0)) as engine:
        options = (engine.url, "--listen=127.0.0.1:0", "--set=gateway.drain_s=0.2")
        with (
            process(*options) as (child, client),
            client.open(COMPLETIONS, BODY | {"stream": True}) as reply,
        ):
            assert reply.readline()
            child.send_signal(signal.SIGTERM)
            assert child.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nobody to serve"),
        (["ftp://x"], "no URL"),
        (["http://127.0.0.1:99999"], "no URL"),
        (["http://[::1"], "no URL"),
        (["http://127.0.0.1:1?events=tcp://[::1"], "says what nobody knows"),
        (["http://127.0.0.1:1", "--set=router.policy=nearest"], "unknown policy"),
        (["http://127.0.0.1:1", "--prefill=ftp://x"], "gateway.disaggregation.prefill"),
        (["http://127.0.0.1:1", "--prefill=http://127.0.0.1:1/"], "is among gateway.replicas"),
        (["http://127.0.0.1:1", "--listen=nowhere"], "no address"),
        (["http://127.0.0.1:1", "--listen=0.0.0.0:0"], "loopback"),
        (["http://127.0.0.1:1", "--set=gateway.tokenizer=/nowhere"], "tokenizer"),
        (["http://127.0.0.1:1", "--set=gateway.operator_file=/nowhere"], "cannot read"),
        (["http://127.0.0.1:1", "--set=gateway.tls.cert=/nowhere"], "certificate"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    listen = [] if any("--listen" in option for option in options) else ["--listen=127.0.0.1:0"]
    assert main(["gateway", *options, *listen]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_operator_drains_a_replica_and_takes_it_back(engine: StubEngine) -> None:
    with StubEngine() as other, serving(engine, other) as gateway:

        def drain(body: dict[str, Any]) -> int:
            return gateway.ask("/replicas/drain", body)[0]

        assert drain({"replica": engine.url}) == 200
        for _ in range(4):
            assert gateway.ask(COMPLETIONS, BODY)[0] == 200
        states = {r["url"]: r for r in gateway.ask("/replicas")[1]["replicas"]}
        assert states[engine.url]["draining"]
        assert drain({"replica": other.url}) == 200
        assert gateway.ask(COMPLETIONS, BODY)[0] == 503
        assert drain({"replica": engine.url, "draining": False}) == 200
        assert gateway.ask(COMPLETIONS, BODY)[0] == 200
        assert drain({"replica": "http://none"}) == 404
        assert drain({"replica": 1}) == 400


def test_programs_are_told_in_json_where_it_listens() -> None:
    options = ("http://127.0.0.1:1", "--listen=127.0.0.1:0", "--json")
    command = [sys.executable, "-m", "kvist.cli.main", "gateway", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        child.send_signal(signal.SIGTERM)
        stopped = json.loads(child.stdout.readline())
    assert (ready["state"], stopped["state"]) == ("ready", "stopped")
    assert ready["url"] == stopped["url"]
    assert ready["url"].startswith("http://127.0.0.1:")

"""Links: fair shares, the slowest of two links, degrading, cancelling."""

from __future__ import annotations

import pytest

from kvist.sim.des.kernel import Kernel
from kvist.sim.des.links import Link, LinkKind, Network


def _link(bytes_per_s: float = 100.0, latency_s: float = 0.0) -> Link:
    return Link(LinkKind.NIC_OUT, 0, bytes_per_s, latency_s)


def _ends(kernel: Kernel, ends: dict[str, float], name: str) -> object:
    return lambda: ends.__setitem__(name, kernel.now_s)


def test_a_lone_flow_takes_its_latency_and_its_bytes() -> None:
    kernel, ends = Kernel(0), {}
    Network(kernel).start((_link(latency_s=0.5),), 200, _ends(kernel, ends, "a"), delay_s=0.25)
    kernel.run()
    assert ends["a"] == pytest.approx(2.75)


def test_two_flows_share_a_link_and_the_second_speeds_up_when_the_first_ends() -> None:
    kernel, ends, link = Kernel(0), {}, _link()
    network = Network(kernel)
    network.start((link,), 100, _ends(kernel, ends, "a"))
    kernel.at(0.5, lambda: network.start((link,), 100, _ends(kernel, ends, "b")))
    kernel.run()
    assert ends["a"] == pytest.approx(1.5)  # 50 alone, 50 at half speed
    assert ends["b"] == pytest.approx(2.0)  # 50 at half speed, 50 alone
    assert link.moved_bytes == 200


def test_a_flow_over_two_links_runs_at_the_lesser_share() -> None:
    kernel, ends, wide, narrow = Kernel(0), {}, _link(1000), _link(10)
    network = Network(kernel)
    network.start((wide, narrow), 100, _ends(kernel, ends, "both"))
    network.start((wide,), 500, _ends(kernel, ends, "wide"))
    kernel.run()
    assert ends["both"] == pytest.approx(10.0)
    assert ends["wide"] == pytest.approx(1.0)  # half of the wide link, although more is left
    assert (wide.moved_bytes, narrow.moved_bytes) == (600, 100)


def test_a_degraded_link_slows_what_is_on_it_until_it_is_whole_again() -> None:
    kernel, ends, link = Kernel(0), {}, _link()
    network = Network(kernel)
    network.start((link,), 200, _ends(kernel, ends, "a"))
    kernel.at(1.0, lambda: network.set_factor(link, 0.1))
    kernel.at(3.0, lambda: network.set_factor(link, 1.0))
    kernel.run()
    assert ends["a"] == pytest.approx(3.8)


def test_a_cancelled_flow_counts_what_it_moved_and_calls_nobody() -> None:
    kernel, ends, link = Kernel(0), {}, _link()
    network = Network(kernel)
    flow = network.start((link,), 500, _ends(kernel, ends, "a"))
    late = network.start((link,), 500, _ends(kernel, ends, "late"), delay_s=9)
    seen = []
    kernel.at(1.0, lambda: seen.append(network.moved_bytes(flow)))
    kernel.at(2.0, lambda: seen.append(network.cancel(flow)))
    kernel.at(3.0, lambda: seen.append(network.cancel(late)))
    kernel.at(4.0, lambda: seen.append(network.cancel(flow)))
    kernel.run()
    assert seen == [100, 200, 0, 200]
    assert ends == {}
    assert link.moved_bytes == 200


def test_a_flow_of_no_bytes_ends_after_its_latency() -> None:
    kernel, ends = Kernel(0), {}
    Network(kernel).start((_link(latency_s=0.5),), 0, _ends(kernel, ends, "a"))
    kernel.run()
    assert ends == {"a": 0.5}

"""A node's blocks asked for over its socket: pages, refusals, versions, and what may not wait."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from node_process import attach, eventually
from node_thread import Raw, dram_store, serving

from kvist.core.errors import NodeAwayError, NodeRefusedError
from kvist.core.events import KvEvent
from kvist.core.outcome import BlockRef
from kvist.node import messages
from kvist.node.cache import desk as desk_module
from kvist.node.cache import messages as m
from kvist.node.cache.client import CacheClient, DeniedError
from kvist.node.cache.wire import decode_reply, decode_request
from kvist.node.client import NodeStore
from kvist.node.keyspaces import Attach
from kvist.node.protocol import ProtocolError, encode
from kvist.policy import LeafLru
from kvist.store import TieredStore
from kvist.testing.store_suite import WAIT_S, DictTier, content, key, put
from kvist.tiers.dram import PAGE_BYTES, Arena

GOLDEN = Path(__file__).parents[1] / "golden" / "node_cache_v2.json"
K = [key(n).hex() for n in range(10)]
REQUESTS: tuple[m.Request, ...] = (
    m.ShowKeyspaces(),
    m.ListRuns(keyspace="00", tenant="a", tier="dram", limit=2),
    m.ListBlocks(ending=K[1], alone=True, cursor="ab", limit=1),
    m.ShowUsage(tenant=""),
    m.PinBlocks(keys=(K[0], K[1])),
    m.UnpinBlocks(keys=(K[0],), tenant="b"),
    m.EvictBlocks(keys=(K[2],)),
    m.MoveBlocks(keys=(K[0], K[1]), parents=(None, K[0]), to="dram", deadline_s=0.5),
    m.MoveBlocks(keys=(K[0],), to="ssd"),
    m.ClearBlocks(tenant="a", deadline_s=0.0),
)
REPLIES: tuple[m.Reply, ...] = (
    m.Keyspaces((m.OpenKeyspace(K[1], 1000, 16, 2),)),
    m.RunPage(K[1], (m.ShownRun(K[0], K[1], "ssd", None, 2, 2000, 0, 1, None),), "ab"),
    m.BlockPage(K[1], (m.ShownBlock(K[0], None, "dram", "a", 9, "clean", True, False, 1.5),), ""),
    m.Usage(K[1], (m.TenantUsage("dram", "a", 1, 1000, 1),), 3),
    m.Changed(1, 2, 3),
    m.Cleared(4, False),
    m.Denied("store", "full"),
)


def two_tiers(of: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
    arena = Arena(8 * PAGE_BYTES, slot_bytes=of.block_bytes)
    return TieredStore(arena, LeafLru(), DictTier(), raw_bytes=of.block_bytes, events=on_event)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "n.sock"


@pytest.fixture
def engine(path: Path) -> Iterator[NodeStore]:
    """An engine on a node of two tiers."""
    with serving(path, two_tiers), NodeStore(path, attach(1)) as store:
        yield store


def write(store: NodeStore, tenant: str, *numbers: int) -> None:
    blocks = [BlockRef(key(n), None, tenant) for n in numbers]
    with store.write(blocks) as lease:
        for i, block in enumerate(blocks):
            lease.buffer(i)[:] = content(block.key, len(lease.buffer(i)))
            assert lease.commit(i)


def test_bytes_of_the_messages_are_what_they_were() -> None:
    """A file that is missing fails: these bytes cross between versions of Kvist."""
    golden = [
        (item["message"], bytes.fromhex(item["bytes"])) for item in json.loads(GOLDEN.read_text())
    ]
    assert [(repr(message), encode(message)) for message in (*REQUESTS, *REPLIES)] == golden
    for message, (_, data) in zip((*REQUESTS, *REPLIES), golden, strict=True):
        decode = decode_request if message in REQUESTS else decode_reply
        assert decode(data[4:]) == message


def test_every_message_has_golden_bytes_and_a_kind_of_its_own() -> None:
    declared = {*m.Request.__args__, *m.Reply.__args__}
    assert declared == {type(message) for message in (*REQUESTS, *REPLIES)}
    for union in (m.Request, m.Reply):
        tags = [kind.__struct_config__.tag for kind in union.__args__]
        assert len(set(tags)) == len(tags)


def test_a_list_comes_in_pages_that_miss_and_repeat_nothing(path: Path, engine: NodeStore) -> None:
    assert all(put(engine, range(5)))
    with CacheClient(path) as client:
        found, cursor, pages = [], "", 0
        while True:
            page = client.ask(m.ListBlocks(tier="dram", cursor=cursor, limit=2), m.BlockPage)
            found += [block.key for block in page.blocks]
            pages += 1
            if not (cursor := page.cursor):
                break
        assert (found, pages) == (K[:5], 3)
        (run,) = client.ask(m.ListRuns(tier="dram"), m.RunPage).runs
        assert (run.first, run.last, run.blocks) == (K[0], K[4], 5)


def test_a_cursor_is_good_for_its_own_tenant_and_list_alone(path: Path, engine: NodeStore) -> None:
    write(engine, "a", 0, 1, 2)
    with CacheClient(path) as client:

        def cursor() -> str:
            return client.ask(m.ListBlocks(tenant="a", limit=1), m.BlockPage).cursor

        for other in (
            m.ListBlocks(tenant="b", cursor=cursor(), limit=1),
            m.ListBlocks(cursor=cursor(), limit=1),
            m.ListBlocks(tenant="a", tier="dram", cursor=cursor(), limit=1),
            m.ListBlocks(tenant="a", cursor="ab", limit=1),
        ):
            with pytest.raises(DeniedError, match="begin a new one") as denied:
                client.ask(other, m.BlockPage)
            assert denied.value.is_ours
        page = client.ask(m.ListBlocks(tenant="a", cursor=cursor(), limit=1), m.BlockPage)
        assert [b.key for b in page.blocks] == [K[1]]


def test_lists_that_nobody_goes_on_with_are_few(path: Path) -> None:
    with serving(path, two_tiers) as server, NodeStore(path, attach(1)) as engine:
        write(engine, "a", 0, 1, 2)
        with CacheClient(path) as client:
            first = client.ask(m.ListBlocks(limit=1), m.BlockPage).cursor
            for _ in range(desk_module.MOST_LISTS):
                client.ask(m.ListBlocks(limit=1), m.BlockPage)
            assert server._counter.desk.lists == desk_module.MOST_LISTS
            with pytest.raises(DeniedError):
                client.ask(m.ListBlocks(limit=1, cursor=first), m.BlockPage)
        server._counter.desk._clock = lambda: float("inf")
        server._counter.tick()
        assert server._counter.desk.lists == 0


def test_pins_moves_and_evictions_reach_the_store(path: Path, engine: NodeStore) -> None:
    write(engine, "a", 0, 1, 2)
    assert engine.flush(WAIT_S)
    with CacheClient(path) as client:
        assert client.ask(m.PinBlocks(keys=(K[0],)), m.Changed).changed == 1
        down = client.ask(m.MoveBlocks(keys=(K[0], K[1]), to="ssd"), m.Changed)
        assert (down.changed, down.left) == (1, 1)
        usage = client.ask(m.ShowUsage(), m.Usage).usage
        assert {(u.tier, u.blocks, u.pinned_blocks) for u in usage} == {
            ("dram", 2, 1),
            ("ssd", 3, 0),
        }
        up = client.ask(m.MoveBlocks(keys=(K[1],), parents=(K[0],), to="dram"), m.Changed)
        assert up == m.Changed(1, 0, 0)
        assert client.ask(m.UnpinBlocks(keys=(K[0],)), m.Changed).changed == 1
        assert client.ask(m.EvictBlocks(keys=(K[0], K[9])), m.Changed) == m.Changed(1, 0, 1)
        assert len(engine.match([key(0)])) == 0
        assert client.ask(m.ClearBlocks(), m.Cleared).complete
        assert len(engine.match([key(1)])) == 0


def test_a_leased_block_is_not_evicted(path: Path, engine: NodeStore) -> None:
    write(engine, "", 0)
    with CacheClient(path) as client, engine.read([key(0)], deadline_s=WAIT_S):
        assert client.ask(m.EvictBlocks(keys=(K[0],)), m.Changed) == m.Changed(0, 0, 1)
        (block,) = client.ask(m.ListBlocks(tier="dram"), m.BlockPage).blocks
        assert block.leased


def test_a_tenant_sees_its_own_blocks_alone(path: Path, engine: NodeStore) -> None:
    write(engine, "a", 0, 1)
    write(engine, "b", 2)
    with CacheClient(path) as client:
        page = client.ask(m.ListBlocks(tenant="b", tier="dram"), m.BlockPage)
        assert [b.key for b in page.blocks] == [K[2]]
        answers = []
        for asked in (K[0], K[9]):  # a foreign one, one that is nowhere
            with pytest.raises(DeniedError) as denied:
                client.ask(m.ListBlocks(tenant="b", ending=asked), m.BlockPage)
            answers.append(str(denied.value).replace(asked, "KEY"))
            evicted = client.ask(m.EvictBlocks(tenant="b", keys=(asked,)), m.Changed)
            assert evicted == m.Changed(0, 0, 1)
        assert answers[0] == answers[1]
        assert client.ask(m.ClearBlocks(tenant="b"), m.Cleared).blocks == 1
    assert len(engine.match([key(0)])) == 1


def test_a_keyspace_is_named_by_its_first_digits(path: Path) -> None:
    with (
        serving(path, dram_store, keyspaces=2),
        CacheClient(path) as client,
    ):
        with pytest.raises(DeniedError, match="no keyspace is open"):
            client.ask(m.ShowUsage(), m.Usage)
        with NodeStore(path, attach(1)) as one, NodeStore(path, attach(2)) as two:
            put(one, [0])
            put(two, [0, 1])
            names = [k.fingerprint for k in client.ask(m.ShowKeyspaces(), m.Keyspaces).keyspaces]
            assert len(names) == 2
            with pytest.raises(DeniedError, match="several keyspaces"):
                client.ask(m.ShowUsage(), m.Usage)
            with pytest.raises(DeniedError, match="no keyspace ff"):
                client.ask(m.ShowUsage(keyspace="ff"), m.Usage)
            counts = [client.ask(m.ShowUsage(keyspace=n), m.Usage).usage[0].blocks for n in names]
            assert sorted(counts) == [1, 2]


def test_an_older_node_and_an_older_client_are_told_in_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(path):
        with Raw(path) as raw:
            raw.send(messages.Control(messages.MAGIC, 1, 1, "cache"))
            reply = raw.reply()
            assert isinstance(reply, messages.Refused)
        monkeypatch.setattr("kvist.node.protocol.NEWEST_PROTOCOL", 1)
        with pytest.raises(NodeRefusedError, match="update the older one"):
            CacheClient(path)


def test_a_second_request_before_the_answer_ends_the_connection(path: Path) -> None:
    with serving(path, two_tiers), Raw(path) as raw:
        raw.send(messages.Control(messages.MAGIC, 2, 2, "cache"))
        assert isinstance(raw.reply(), messages.Report)
        raw.link.sendall(2 * encode(m.ShowKeyspaces()))
        reply = raw.reply()
        assert isinstance(reply, messages.Refused)
        assert "before the answer" in reply.reason
        assert raw.reply() is None


def test_a_node_that_ends_says_so_to_who_asks(path: Path) -> None:
    with serving(path) as server, CacheClient(path) as client:
        server.stop("the test ends it")
        eventually(lambda: not server._peers)
        with pytest.raises(NodeAwayError):
            client.ask(m.ShowKeyspaces(), m.Keyspaces)


def test_who_asks_nothing_is_let_go(path: Path) -> None:
    with serving(path) as server, CacheClient(path):
        eventually(lambda: len(server._peers) == 1)
        server._clock = lambda: float("inf")
        eventually(lambda: not server._peers)


def test_work_for_people_does_not_delay_an_engine(path: Path) -> None:
    """Both threads sit in a medium that hangs; the engine is attached and served meanwhile."""
    tier = DictTier()

    def hanging(of: Attach, on_event: Callable[[KvEvent], None]) -> TieredStore:
        arena = Arena(8 * PAGE_BYTES, slot_bytes=of.block_bytes)
        return TieredStore(arena, LeafLru(), tier, raw_bytes=of.block_bytes, events=on_event)

    with serving(path, hanging), NodeStore(path, attach(1)) as engine:
        put(engine, [0])
        tier.listable.clear()
        clients = [CacheClient(path) for _ in range(2)]
        for client in clients:
            client._send(m.ListBlocks(tier="ssd"))
        with NodeStore(path, attach(1)) as another:
            assert len(another.match([key(0)])) == 1
            assert another.evict([key(0)]) == 1
        tier.listable.set()
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "evict", "keys": []},
        {"kind": "evict", "keys": ["zz" * 32]},
        {"kind": "evict", "keys": [K[0][:-1]]},
        {"kind": "evict", "keys": [K[0] + "\n"]},
        {"kind": "evict", "keys": [K[0]] * (m.MOST_KEYS + 1)},
        {"kind": "evict", "keys": [K[0]], "more": 1},
        {"kind": "evict", "keys": [K[0]], "tenant": "x" * 257},
        {"kind": "move", "keys": [K[0]], "to": "hbm"},
        {"kind": "move", "keys": [K[0]], "to": "dram", "deadline_s": 11.0},
        {"kind": "move", "keys": [K[0]], "to": "dram", "deadline_s": float("nan")},
        {"kind": "blocks", "limit": 0},
        {"kind": "blocks", "limit": m.MOST_ITEMS + 1},
        {"kind": "blocks", "ending": "0x12"},
        {"kind": "nothing"},
        {"keys": []},
        [1, 2],
    ],
)
def test_fields_out_of_bounds_are_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        decode_request(msgspec.msgpack.encode(fields))


def test_a_move_with_other_parents_than_keys_is_denied(path: Path, engine: NodeStore) -> None:
    with CacheClient(path) as client, pytest.raises(DeniedError, match="1 keys with 2 parents"):
        client.ask(m.MoveBlocks(keys=(K[0],), parents=(K[1], K[2]), to="dram"), m.Changed)

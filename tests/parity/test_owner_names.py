"""Names that sources give to blocks: both implementations against plain dictionaries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owner_doubles import KEYS, SEED, WIDTH, contents, named, new_table

from kvist.core.keys import token_bytes
from kvist.native.twin import chain_keys

PROMPTS = [[n % (3 + who) + who // 2 * (n > 2) for n in range(5 * WIDTH)] for who in range(4)]


class Facts:
    """What a table must hold: (tag → source → tiers), and what each source calls which key."""

    def __init__(self) -> None:
        self.owners: dict[bytes, dict[int, int]] = {}
        self.names: dict[tuple[int, bytes], bytes] = {}

    def held(self) -> dict[bytes, list[tuple[int, int]]]:
        return {tag: sorted(owners.items()) for tag, owners in self.owners.items() if owners}

    def add(self, source: int, tiers: int, keys: list[bytes]) -> None:
        for key in keys:
            tag = self.names.get((source, key[:8]), key)[:16]
            owners = self.owners.setdefault(tag, {})
            owners[source] = owners.get(source, 0) | tiers

    def remove(self, source: int, tiers: int, keys: list[bytes]) -> None:
        for key in keys:
            own = self.names.get((source, key[:8]))
            owners = self.owners.get((own or key)[:16], {})
            left = owners.pop(source, 0) & ~tiers
            if left:
                owners[source] = left
            elif own is not None:
                del self.names[source, key[:8]]

    def add_chain(
        self, source: int, tiers: int, names: list[bytes], parent: bytes | None, tokens: list[int]
    ) -> bool:
        start = SEED
        if parent is not None:
            start = self.names.get((source, parent[:8]), parent)
            if source not in self.owners.get(start[:16], {}):
                return False
        for name, key in zip(names, chain_keys(start, tokens, WIDTH), strict=True):
            owners = self.owners.setdefault(key[:16], {})
            owners[source] = owners.get(source, 0) | tiers
            if name != key:
                self.names.setdefault((source, name[:8]), key)
        return True

    def drop(self, source: int) -> None:
        self.names = {called: key for called, key in self.names.items() if called[0] != source}
        for owners in self.owners.values():
            owners.pop(source, None)

    def fade(self, tiers: int) -> None:
        for owners in self.owners.values():
            for source, bits in list(owners.items()):
                owners[source] = bits & ~tiers
                if not owners[source]:
                    del owners[source]


SOURCES, TIERS = st.integers(0, 2), st.integers(1, 7)
NAMES = [name for who in range(3) for name in named(who, 5)[0]]
CALLS = st.one_of(
    st.tuples(
        st.sampled_from(("add", "remove", "remove")),
        SOURCES,
        TIERS,
        st.lists(st.sampled_from(NAMES + KEYS[:3]), max_size=4),
    ),
    st.tuples(
        st.just("add_chain"),
        SOURCES,
        TIERS,
        st.integers(0, 2),
        st.one_of(st.none(), st.sampled_from(NAMES)),
        st.sampled_from(PROMPTS),
        st.integers(1, 5),
    ),
    st.tuples(st.just("drop"), SOURCES),
    st.tuples(st.just("fade"), TIERS),
)


@settings(max_examples=300)
@given(calls=st.lists(CALLS, max_size=40))
def test_any_calls_leave_what_dictionaries_hold(
    native: ModuleType, calls: list[tuple[Any, ...]]
) -> None:
    table, facts = new_table(native), Facts()
    for name, *rest in calls:
        if name != "add_chain":
            getattr(table, name)(*rest)
            getattr(facts, name)(*rest)
            continue
        source, tiers, who, parent, prompt, count = rest
        names, tokens = named(who, 5)[0][:count], prompt[: count * WIDTH]
        done = table.add_chain(source, tiers, names, parent, SEED, token_bytes(tokens), WIDTH)
        assert done == facts.add_chain(source, tiers, names, parent, tokens)
    assert contents(table) == facts.held()
    assert len(table) == len(facts.held())
    assert table.names == len(facts.names)


def test_blocks_are_found_by_keys_made_of_their_tokens(native: ModuleType) -> None:
    table = new_table(native)
    for who in (0, 1):
        names, keys, tokens = named(who, 6)
        cut = 4 * 2 * WIDTH
        assert table.add_chain(who, 1, names[:2], None, SEED, tokens[:cut], WIDTH)
        assert table.add_chain(who, 1, names[2:], names[1], SEED, tokens[cut:], WIDTH)
    assert table.runs(keys) == [(0, 6), (1, 6)]
    assert table.names == 12


def test_block_whose_parent_is_not_held_is_left_out(native: ModuleType) -> None:
    table = new_table(native)
    names, _, tokens = named(0, 2)
    half = tokens[: 4 * WIDTH]
    assert not table.add_chain(0, 1, names[1:], names[0], SEED, half, WIDTH)
    assert table.add_chain(0, 1, names[:1], None, SEED, half, WIDTH)
    assert not table.add_chain(1, 1, names[1:], names[0], SEED, half, WIDTH)
    table.remove(0, 1, names[:1])
    assert not table.add_chain(0, 1, names[1:], names[0], SEED, half, WIDTH)
    assert (len(table), table.names) == (0, 0)


def test_parent_may_be_given_by_its_key(native: ModuleType) -> None:
    table = new_table(native)
    names, keys, tokens = named(0, 2)
    half = 4 * WIDTH
    table.add(0, 2, keys[:1])
    assert table.add_chain(0, 1, names[1:], keys[0], SEED, tokens[half:], WIDTH)
    assert table.find(keys[1]) == [(0, 1)]
    assert not table.add_chain(0, 1, names[1:], keys[0][:16], SEED, tokens[half:], WIDTH)


def test_name_lives_until_its_block_has_left_every_tier(native: ModuleType) -> None:
    table = new_table(native)
    names, keys, tokens = named(0, 3)
    table.add_chain(0, 1, names, None, SEED, tokens, WIDTH)
    table.add(0, 2, names[:2])  # offloaded under the same hashes
    table.remove(0, 1, names)
    assert table.runs(keys) == [(0, 2)]
    assert table.names == 2
    table.remove(0, 2, names)
    assert (len(table), table.names) == (0, 0)


def test_name_that_is_the_key_is_not_kept(native: ModuleType) -> None:
    table = new_table(native)
    _, keys, tokens = named(0, 3)
    assert table.add_chain(0, 2, keys, None, SEED, tokens, WIDTH)
    assert (table.names, table.runs(keys)) == (0, [(0, 3)])


def test_evicted_block_keeps_its_name_from_meaning_another(native: ModuleType) -> None:
    """A block goes because the table is full; the engine then says that it has removed it."""
    table = new_table(native, 8)
    names, keys, tokens = named(0, 8)
    table.add_chain(0, 1, names, None, SEED, tokens, WIDTH)
    table.add(1, 1, KEYS[:8])
    assert table.runs(keys) == []
    table.remove(0, 1, names)
    assert table.names == 0
    assert len(table) == 8
    assert all(table.find(key) == [(1, 1)] for key in KEYS[:8])


def test_names_never_exceed_the_bound(native: ModuleType) -> None:
    table = new_table(native, most_names=100)
    for who in range(10):
        names, _, _ = named(who, 30)
        tokens = token_bytes([who] * 30 * WIDTH)
        assert table.add_chain(who % 3, 1, names, None, SEED, tokens, WIDTH)
        assert table.names <= 100
    assert table.evicted == 200
    assert len(table) == 100


@pytest.mark.parametrize(
    ("seed", "tokens", "block_tokens"),
    [(SEED[:31], bytes(16), WIDTH), (SEED, bytes(15), WIDTH), (SEED, b"", 0)],
)
def test_chain_that_contradicts_itself_changes_nothing(
    native: ModuleType, seed: bytes, tokens: bytes, block_tokens: int
) -> None:
    table = new_table(native)
    with pytest.raises(ValueError, match=r"seed is not|tokens are 4 bytes"):
        table.add_chain(0, 1, named(0, 2)[0], None, seed, tokens, block_tokens)
    assert len(table) == 0

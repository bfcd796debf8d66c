"""What was sealed opens with its key, as its own block, unchanged, or not at all."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.codec.aead import Sealer
from kvist.codec.keyring import Keyring
from kvist.codec.payload import HEAD_BYTES
from kvist.core.errors import ConfigError, FormatError

pytest.importorskip("cryptography")

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
BOTH = Sealer(Keyring("new", {"new": NEW, "old": OLD}))
ONLY_OLD = Sealer(Keyring("old", {"old": OLD}))
PAYLOAD = b"a payload that nobody else may read"
PLACE = b"lossless+aead\0" + bytes(32)


def opened(sealer: Sealer, stored: bytes, context: bytes = PLACE) -> bytes:
    return sealer.open(memoryview(stored), context=context)


@given(payload=st.binary(max_size=300), tenant=st.text(max_size=20))
def test_what_was_sealed_opens_and_shows_nothing(payload: bytes, tenant: str) -> None:
    stored = BOTH.seal(payload, context=PLACE, tenant=tenant)
    assert opened(BOTH, stored) == payload
    assert len(payload) < 8 or payload not in stored[HEAD_BYTES:]
    assert len(stored) == HEAD_BYTES + 44 + len(payload)


def test_sealing_twice_gives_other_bytes() -> None:
    assert BOTH.seal(PAYLOAD, context=PLACE) != BOTH.seal(PAYLOAD, context=PLACE)


def test_after_a_rotation_both_keys_open_and_the_new_one_writes() -> None:
    before, after = (s.seal(PAYLOAD, context=PLACE) for s in (ONLY_OLD, BOTH))
    assert opened(BOTH, before) == opened(BOTH, after) == PAYLOAD
    assert b"new" in after[:HEAD_BYTES]
    with pytest.raises(FormatError, match="not ours"):
        opened(ONLY_OLD, after)


def test_another_secret_under_the_same_id_does_not_open() -> None:
    with pytest.raises(FormatError, match="does not open"):
        opened(Sealer(Keyring("old", {"old": NEW})), ONLY_OLD.seal(PAYLOAD, context=PLACE))


def test_a_block_does_not_open_in_the_place_of_another() -> None:
    """Whoever can write to the disk cannot pass one block off as another."""
    stored = BOTH.seal(PAYLOAD, context=PLACE)
    for other in (PLACE[:-1] + b"\1", b"aead\0" + bytes(32), b""):
        with pytest.raises(FormatError, match="does not open"):
            opened(BOTH, stored, other)


def test_tenants_have_keys_of_their_own_and_their_names_do_not_show() -> None:
    first, second = (BOTH.seal(PAYLOAD, context=PLACE, tenant=t) for t in ("ann", "bob"))
    assert b"ann" not in first
    tags = [stored[HEAD_BYTES : HEAD_BYTES + 16] for stored in (first, second)]
    assert tags[0] != tags[1]
    with pytest.raises(FormatError):
        opened(BOTH, first[:HEAD_BYTES] + tags[1] + first[HEAD_BYTES + 16 :])


def test_every_changed_bit_and_every_cut_is_refused() -> None:
    stored = BOTH.seal(PAYLOAD, context=PLACE)
    for bit in range(8 * len(stored)):
        bad = bytearray(stored)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            opened(BOTH, bytes(bad))
    for size in range(len(stored)):
        with pytest.raises(FormatError):
            opened(BOTH, stored[:size])
    with pytest.raises(FormatError):
        opened(BOTH, stored + b"\0")


def test_missing_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"kvist\[seal\]"):
        Sealer(Keyring("old", {"old": OLD}))

"""Chains are named in one way, and a tier reads what it may and nothing else."""

from __future__ import annotations

import pytest

from kvist.codec.chain import CODECS, parse_chain
from kvist.codec.keyring import Keyring
from kvist.codec.registry import CodecRegistry, open_codecs
from kvist.core.errors import ConfigError, FormatError
from kvist.core.layout import BlockLayout
from kvist.native import digest
from kvist.testing.codec_suite import suite_values

LAYOUT = BlockLayout(2, 2, 16, 32, "bfloat16")
BLOCK = suite_values(LAYOUT, "channels")
KEY = digest(b"a block")
RING = Keyring("first", {"first": bytes(32)})
NAMES = ["aead", *CODECS, *(f"{word}+aead" for word in CODECS)]


def there_and_back(codecs: CodecRegistry, name: str) -> bytes:
    stored = open_codecs(name, LAYOUT, RING).writer.encode(memoryview(BLOCK), key=KEY)
    out = bytearray(len(BLOCK))
    codecs.find(name).decode(memoryview(stored), memoryview(out), key=KEY)
    return bytes(out)


@pytest.mark.parametrize(("text", "name"), [("raw+aead", "aead"), *((n, n) for n in NAMES)])
def test_a_chain_has_one_name_whatever_it_was_called(text: str, name: str) -> None:
    pytest.importorskip("cryptography")
    assert parse_chain(text).name == name
    assert open_codecs(text, LAYOUT, RING).writer.name == name


@pytest.mark.parametrize(
    "text", ["", "+", "zip", "lossless+int8", "aead+lossless", "aead+aead", "RAW", "int8+"]
)
def test_what_is_no_chain_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.ssd\.codec: no codec is named .*; use raw") as e:
        parse_chain(text)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_written_is_read_by_a_lossy_setting(name: str) -> None:
    pytest.importorskip("cryptography")
    codecs = open_codecs("int4", LAYOUT, RING)
    again = there_and_back(codecs, name)
    assert (again == BLOCK) == parse_chain(name).exact


@pytest.mark.parametrize("text", ["raw", "lossless", "aead", "lossless+aead"])
def test_an_exact_setting_does_not_know_lossy_chains(text: str) -> None:
    """Blocks that int4 left in the folder must not reach one who asked for exact answers."""
    pytest.importorskip("cryptography")
    codecs = open_codecs(text, LAYOUT, RING)
    assert {"aead", "lossless+aead"} <= set(codecs.names) <= {"lossless", "aead", "lossless+aead"}
    for name in codecs.names:
        assert there_and_back(codecs, name) == BLOCK


@pytest.mark.parametrize("text", ["aead", "lossless+aead", "int4+aead"])
def test_a_sealed_setting_reads_what_is_sealed_only(text: str) -> None:
    """Else whoever can write to the disk writes a raw block and needs no key."""
    pytest.importorskip("cryptography")
    codecs = open_codecs(text, LAYOUT, RING)
    assert not codecs.takes_raw
    assert all(name.endswith("aead") for name in codecs.names)
    assert open_codecs("lossless", LAYOUT, RING).takes_raw
    assert CodecRegistry().takes_raw


def test_without_keys_sealed_chains_are_unknown() -> None:
    assert set(open_codecs("int8", LAYOUT).names) == set(CODECS)
    assert open_codecs("raw", LAYOUT).find("aead") is None
    with pytest.raises(ConfigError, match=r"store\.ssd\.keys: aead needs keys"):
        open_codecs("aead", LAYOUT)


def test_without_a_layout_only_raw_and_aead_can_be_had() -> None:
    pytest.importorskip("cryptography")
    assert open_codecs("raw", None).names == ()
    assert open_codecs("raw", None, RING).names == ("aead",)
    with pytest.raises(ConfigError, match="layout"):
        open_codecs("lossless", None)


def test_a_lossy_codec_for_fp8_values_is_refused_and_others_are_not() -> None:
    layout = BlockLayout(2, 2, 16, 32, "float8_e4m3")
    with pytest.raises(ConfigError, match="float8_e4m3"):
        open_codecs("int8", layout)
    assert open_codecs("lossless", layout).names == ("lossless",)


def test_a_raw_payload_of_another_size_is_refused() -> None:
    pytest.importorskip("cryptography")
    chain = open_codecs("aead", None, RING).writer
    stored = chain.encode(memoryview(b"four"), key=KEY)
    with pytest.raises(FormatError, match="4 bytes, not 5"):
        chain.decode(memoryview(stored), memoryview(bytearray(5)), key=KEY)


@pytest.mark.parametrize("name", ["aead", "lossless+aead"])
def test_a_sealed_block_opens_under_its_own_key_and_chain_only(name: str) -> None:
    pytest.importorskip("cryptography")
    codecs = open_codecs(name, LAYOUT, RING)
    stored = memoryview(codecs.writer.encode(memoryview(BLOCK), key=KEY))
    out = memoryview(bytearray(len(BLOCK)))
    for other, key in ((name, digest(b"another block")), ("aead", KEY), ("lossless+aead", KEY)):
        if (other, key) != (name, KEY):
            with pytest.raises(FormatError, match="does not open"):
                codecs.find(other).decode(stored, out, key=key)
    codecs.writer.decode(stored, out, key=KEY)
    assert out == BLOCK


def test_too_large_a_block_is_not_sealed() -> None:
    pytest.importorskip("cryptography")
    layout = BlockLayout(64, 64, 256, 1024, "float32")
    with pytest.raises(ConfigError, match="too large"):
        open_codecs("aead", layout, RING)

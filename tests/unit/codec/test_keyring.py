"""Keys come from a file or a variable, and no message shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.codec.keyring import read_keyring
from kvist.core.errors import ConfigError

FIRST, SECOND = "1f" * 32, "A0" * 32


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_first_key_of_a_file_writes_and_all_read(tmp_path: Path) -> None:
    text = f"# rotated in spring\n\nk2 {SECOND}\n  k1   {FIRST}  \n"
    ring = read_keyring(written(tmp_path / "keys", text))
    assert ring.writes == "k2"
    assert ring.secrets == {"k2": bytes.fromhex(SECOND), "k1": bytes.fromhex(FIRST)}


def test_keys_come_from_a_variable_too() -> None:
    ring = read_keyring("env:KEYS", env={"KEYS": f"a {FIRST}"})
    assert ring.secrets == {"a": bytes.fromhex(FIRST)}
    with pytest.raises(ConfigError, match="no environment variable NONE"):
        read_keyring("env:NONE", env={})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        FIRST,
        f"k1 {FIRST[:-1]}",
        f"k1 {FIRST}0",
        f"k1 {FIRST} more",
        f"k/1 {FIRST}",
        f"{'k' * 17} {FIRST}",
        f"k1 {FIRST}\nk1 {SECOND}",
        f"k1 {'zz' * 32}",
        "k1 " + "1" * (1 << 17),
    ],
)
def test_another_text_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.ssd\.keys") as error:
        read_keyring(written(tmp_path / "keys", text))
    assert FIRST[:8] not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keyring(written(tmp_path / "keys", f"k1 {FIRST}", mode))


def test_a_file_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        read_keyring(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="needs keys"):
        read_keyring("")


def test_secrets_are_not_in_the_repr() -> None:
    ring = read_keyring("env:KEYS", env={"KEYS": f"a {FIRST}"})
    assert "secrets" not in repr(ring)

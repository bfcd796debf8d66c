"""The table of a model: a file that is proven before it is used, and what a profile puts in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvist.codec.cachegen.profile import Sample, Sensitivity, build_table, turning_pays
from kvist.codec.cachegen.table import ProfileTable, TableShape, read_table
from kvist.core.errors import ChecksumError, ConfigError, FormatError, VersionError
from kvist.native import checksum
from kvist.testing.made_up_kv import inverse_frequencies, made_up_kv, made_up_table

SHAPE = TableShape(2, 2, 2, 16)
TABLE = made_up_table(SHAPE)
EVEN = Sensitivity(np.full((2, 2, 2, 16), 1e-9), answer_tokens=128)


def sealed(data: bytes) -> bytes:
    return data[:-8] + checksum(data[:-8]).to_bytes(8, "little")


def test_a_file_gives_back_its_table() -> None:
    again = ProfileTable.parse(TABLE.file_bytes)
    assert again.id == TABLE.id
    assert again.shape == SHAPE
    assert np.array_equal(again.basis, TABLE.basis)


def test_every_damaged_byte_of_a_file_is_noticed() -> None:
    data = TABLE.file_bytes
    for at in [*range(48), *range(48, len(data), 997), len(data) - 1]:
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(FormatError):
            ProfileTable.parse(bytes(bad))
    for size in (0, 7, 48, 60, len(data) - 1):
        with pytest.raises(FormatError):
            ProfileTable.parse(data[:size])


def test_a_file_that_lies_behind_a_right_checksum_is_refused() -> None:
    data = bytearray(TABLE.file_bytes)
    with pytest.raises(ChecksumError):
        ProfileTable.parse(bytes(data[:-1] + b"\0"))
    newer = bytearray(data)
    newer[8] = 2
    with pytest.raises(VersionError):
        ProfileTable.parse(sealed(bytes(newer)))
    for at, value in ((12, 99), (12, 0), (24, 0), (28, 200), (10, 1)):
        bad = bytearray(data)
        bad[at] = value
        with pytest.raises(FormatError):
            ProfileTable.parse(sealed(bytes(bad)))
    with pytest.raises(FormatError, match="no profile writes"):
        ProfileTable.parse(sealed(bytes(data[:-10] + b"\xff\xff" + data[-8:])))


@pytest.mark.parametrize("field", ["weight", "delta_step", "mean"])
def test_a_table_with_impossible_numbers_is_refused(field: str) -> None:
    values = getattr(TABLE, field).copy()
    values.flat[0] = np.nan
    with pytest.raises(FormatError):
        dataclasses.replace(TABLE, **{field: values}).check()
    if field != "mean":
        values.flat[0] = 0
        with pytest.raises(FormatError):
            dataclasses.replace(TABLE, **{field: values}).check()


def test_reading_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "model.kvcg"
    file.write_bytes(TABLE.file_bytes)
    assert read_table(file).id == TABLE.id
    file.write_bytes(b"something else")
    for path, want in ((file, "not a table"), (tmp_path / "none", "No such file"), ("", "needs")):
        with pytest.raises(ConfigError, match=want) as e:
            read_table(path)
        assert "kvist codec profile" in str(e.value)
        assert "\n" not in str(e.value)


def test_keys_are_turned_back_only_where_it_pays() -> None:
    samples = [Sample(made_up_kv(SHAPE, 200))]
    right = inverse_frequencies(16)
    assert turning_pays(samples, EVEN, right)
    assert not turning_pays(samples, EVEN, right[::-1].copy())


def test_directions_are_independent_and_errors_cost_alike() -> None:
    """The basis makes the profile's own samples uncorrelated in channels scaled by what errors
    cost, strongest direction first.
    """
    basis = TABLE.basis.astype(np.float64) / 127
    assert np.abs(basis @ basis.transpose(0, 2, 1) - np.eye(16)).max() < 0.05
    falling = np.diff(TABLE.row_exponent.astype(int), axis=1)
    assert (falling <= 1).all()


def test_a_channel_that_matters_more_gets_smaller_errors() -> None:
    square = EVEN.square.copy()
    square[0, 1, 0, 5] *= 400
    table = build_table([Sample(made_up_kv(SHAPE, 200))], Sensitivity(square, 128))
    weight = table.weight.reshape(2, 2, 2, 16)[0, 1, 0]
    assert weight.argmax() == 5
    assert weight[5] > 4 * np.median(weight)


def test_what_no_profile_can_be_made_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 15 tokens"):
        build_table([], EVEN)
    with pytest.raises(ConfigError, match="at least 15 tokens"):
        build_table([Sample(made_up_kv(SHAPE, 12))], EVEN)
    with pytest.raises(ConfigError, match="not of the samples' shape"):
        build_table([Sample(made_up_kv(TableShape(2, 2, 2, 8), 40))], EVEN)

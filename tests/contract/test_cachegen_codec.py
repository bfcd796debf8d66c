"""Every level of `cachegen` is a codec."""

from __future__ import annotations

import pytest

from kvist.codec.cachegen.codec import Cachegen
from kvist.codec.cachegen.levels import level_named
from kvist.codec.cachegen.table import TableShape
from kvist.codec.payload import BlockCodec
from kvist.core.layout import BlockLayout
from kvist.testing.codec_suite import CodecSuite
from kvist.testing.made_up_kv import made_up_table


class _Suite(CodecSuite):
    exact = False
    level = ""

    def open_codec(self, layout: BlockLayout) -> BlockCodec:
        return Cachegen(made_up_table(TableShape.of(layout)), level_named(self.level), layout)


class TestFinest(_Suite):
    level = "cachegen-1"


class TestCoarsest(_Suite):
    level = "cachegen-7"


class TestPaper(_Suite):
    level = "cachegen-paper-3"


def test_the_suite_is_not_run_without_a_level() -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        level_named(_Suite.level)

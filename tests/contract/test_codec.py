"""Every codec of blocks passes the published suite."""

from __future__ import annotations

from kvist.codec.lossless import Lossless
from kvist.codec.payload import BlockCodec
from kvist.codec.quantised import Quantised
from kvist.core.layout import BlockLayout
from kvist.testing.codec_suite import CodecSuite


class TestLossless(CodecSuite):
    def open_codec(self, layout: BlockLayout) -> BlockCodec:
        return Lossless(layout)


class _QuantisedSuite(CodecSuite):
    exact = False
    word = ""

    def open_codec(self, layout: BlockLayout) -> BlockCodec:
        return Quantised(self.word, layout)


class TestInt8(_QuantisedSuite):
    word = "int8"


class TestFp8(_QuantisedSuite):
    word = "fp8"


class TestInt4(_QuantisedSuite):
    word = "int4"

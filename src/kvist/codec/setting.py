"""What a configuration says of a tier's codec, and how it becomes a registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvist.codec.aead import Sealer
from kvist.codec.cachegen.table import read_table
from kvist.codec.chain import TABLED, parse_chain
from kvist.codec.keyring import read_keyring
from kvist.codec.registry import CodecRegistry, open_codecs
from kvist.core.errors import ConfigError
from kvist.core.layout import BlockLayout

SSD = "store.ssd"
REMOTE = "store.remote"


@dataclass(frozen=True, slots=True)
class CodecSetting:
    """Three knobs of one tier; `section` is where they stand, for what errors say."""

    section: str
    codec: str
    keys: str
    table: str

    def check(self) -> None:
        """Tries all that can be tried without a model.

        Raises:
            ConfigError: there is no such chain; keys, a table or a package are missing or wrong.
        """
        with self._named():
            chain = parse_chain(self.codec)
            if chain.sealed or self.keys:
                Sealer(read_keyring(self.keys))
            if chain.word in TABLED or self.table:
                read_table(self.table)

    def open(self, layout: BlockLayout | None) -> CodecRegistry:
        """What a tier of blocks of `layout` writes and reads.

        Raises:
            ConfigError: as `check`, or the codec does not take the layout.
        """
        with self._named():
            keyring = read_keyring(self.keys) if self.keys else None
            table = read_table(self.table) if self.table else None
            return open_codecs(self.codec, layout, keyring, table)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Lets errors name the knobs of this section."""
        try:
            yield
        except ConfigError as error:
            path = error.path.replace(f"$.{SSD}.", f"$.{self.section}.")
            raise ConfigError(error.message, path=path, remedy=error.remedy) from error

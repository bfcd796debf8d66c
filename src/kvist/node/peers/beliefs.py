"""What a reader believes that its peers have, where it has to ask them: by probes.

`Beliefs` is what `tier.py` reads by. `Probed` is for peers that were configured; in a cluster the
directory knows (`directed.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Protocol

from kvist.core.errors import KvistError
from kvist.core.keys import Key
from kvist.node.peers.member import Member
from kvist.tiers.probing import ProbeCounts, Prober
from kvist.tiers.remote.knowledge import Knowledge

_log = logging.getLogger(__name__)
_PROBE_WAIT_S = 0.05  # for the slower of several peers; what they say later is learned, too


class Beliefs(Protocol):
    """Which peers there are, and which of them has what. Thread-safe."""

    def owners(self, key: Key, *, ask: bool = False) -> Sequence[Member]:
        """Peers that a block may be read from now, for nobody is waited; best first.

        With `ask`, where nobody is known to have it, peers may be asked for later.
        """
        ...

    def run(self, keys: Sequence[Key], *, ask: bool = False) -> int:
        """How many keys from the first on have owners; with `ask`, peers may be waited for."""
        ...

    def forget(self, keys: Iterable[Key] | None) -> None:
        """Who has these blocks (`None`: any) is to be found out anew."""
        ...

    def samples(self) -> Mapping[str, float]:
        """Metrics of the peers."""
        ...

    def close(self) -> None:
        """Asks no more, and hangs up on every peer. Idempotent."""
        ...


class Probed:
    """Beliefs about peers that never change, learned by asking them when somebody looks."""

    def __init__(self, known: Mapping[Member, Knowledge], *, probe_s: float) -> None:
        """Owns the peers. `probe_s`: how long a look-up of a prompt's keys may wait; 0: never."""
        self.known = dict(known)
        self._members = list(known)
        self._patience_s = max(probe_s, _PROBE_WAIT_S)
        self.learned = ProbeCounts()
        self._prober = Prober(
            self,
            self._probe,
            name="peers",
            probe_s=probe_s,
            available=lambda: any(member.askable() for member in self._members),
            counts=self.learned,
        )

    def owners(self, key: Key, *, ask: bool = False) -> Sequence[Member]:
        """See `Beliefs`."""
        found = [m for m, known in self.known.items() if known.is_present(key) and m.readable()]
        if ask and not found and self.unknown((key,)):
            self._prober.note(key)
        return found

    def run(self, keys: Sequence[Key], *, ask: bool = False) -> int:
        """See `Beliefs` and `tiers.probing.Beliefs`."""
        if ask:
            return self._prober.run(keys)
        readable = [known for member, known in self.known.items() if member.readable()]
        if len(readable) == 1:
            return readable[0].run(keys)
        return next(
            (i for i, key in enumerate(keys) if not any(k.is_present(key) for k in readable)),
            len(keys),
        )

    def forget(self, keys: Iterable[Key] | None) -> None:
        """See `Beliefs`; for a while nobody is asked for `keys` again."""
        gone = None if keys is None else list(keys)
        for known in self.known.values():
            if gone is None:
                known.clear()
            else:
                known.drop(gone)

    def samples(self) -> Mapping[str, float]:
        """See `Beliefs`."""
        return {n: v for member in self._members for n, v in member.samples().items()}

    def close(self) -> None:
        """See `Beliefs`."""
        self._prober.stop()
        for member, known in self.known.items():
            member.close()
            known.clear()

    def unknown(self, keys: Sequence[Key]) -> list[Key]:
        """See `tiers.probing.Beliefs`: those that some peer could be asked for."""
        known_by = [known for member, known in self.known.items() if member.readable()]
        left = [key for key in keys if not any(known.is_present(key) for known in known_by)]
        open_to = [set(known.unknown(left)) for m, known in self.known.items() if m.askable()]
        return [key for key in left if any(key in some for some in open_to)]

    def _probe(self, keys: Sequence[Key]) -> None:
        """Asks every peer that is free, and waits a moment for those that are slow."""
        calls = []
        for member, known in self.known.items():
            unknown = known.unknown(keys)
            if unknown and member.askable() and not member.asker.busy:
                calls.append(member.asker.submit(partial(self.ask, member, unknown)))
        wait(calls, timeout=self._patience_s)
        self.learned.probed += len(keys)

    def ask(self, member: Member, keys: Sequence[Key]) -> None:
        """Asks a peer and remembers what it says."""
        known = self.known[member]
        mark = known.mark()
        try:
            found = member.probe(keys)
        except (KvistError, OSError) as error:  # the member has told its breaker, and the log
            self.learned.failures += 1
            _log.debug("peer %s: %s", member.name, error)
            return
        if found is not None:
            known.drop(set(keys).difference(found), since=mark)
            known.add(dict.fromkeys(found, 0), since=mark)
            self.learned.found += len(found)

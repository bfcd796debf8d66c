"""Would plain leaf-first LRU have had more hits? A shadow of it that costs nearly nothing.

Of LRU only one thing has to be known: how far back its memory reaches. Each request (a turn) counts
the blocks that were used last in it. Seen from now, LRU of the same size holds the turns that
together have as many blocks as are present; a use hits there if the block's last turn is among
them. The oldest of these turns may fit in part; a use of its blocks counts as that part of a hit.

From both counts follows by how much the policy is behind. Old counts fade, and the lead that it can
save up is bounded, so that a change of traffic shows.
"""

from __future__ import annotations

from collections import deque

_FEWEST_WINDOW_BLOCKS = 20_000
_WINDOW_CAPACITIES = 4
_FEWEST_WINDOW_TURNS = 1000
_GIVE_UP_RATIO = 0.0015  # of accesses, lost against LRU
_GIVE_UP_REQUESTS = 1.0  # beyond that, as one request more or less proves nothing
_TRY_AGAIN_RATIO = 0.00075
_MOST_LEAD_RATIO = 0.03
_SWEEP_SLACK = 64


class Turn:
    """The blocks whose last use was in one request, and the share of them that LRU still has."""

    __slots__ = ("blocks", "number", "queued", "share")

    def __init__(self, number: int) -> None:
        self.number = number  # in order of time
        self.blocks = 0
        self.share = 1.0
        self.queued = True


class Duel:
    """Counts hits of LRU beside those that the owner had."""

    def __init__(self) -> None:
        self.behind = False  # whether LRU is the better choice now
        self._number = 0
        self._try_again = 0  # the turn by which it does, whatever the deficit
        self._capacity_blocks = 0
        self._turns: deque[Turn] = deque()  # that LRU holds, the oldest first
        self._most_turns = _SWEEP_SLACK
        self._blocks = 0  # in them
        self._seen_turns = 0
        self._accesses = 0.0
        self._deficit = 0.0  # hits of LRU without those of the owner

    def hit(self, blocks: int) -> None:
        """The owner had this many hits."""
        self._deficit -= blocks

    def move(self, old: Turn | None, new: Turn, blocks: int) -> None:
        """This many blocks were used, last before in `old`, if ever."""
        self._accesses += blocks
        new.blocks += blocks
        self._blocks += blocks
        if old is not None:
            self._deficit += blocks * old.share
            if old.queued:
                old.blocks -= blocks
                self._blocks -= blocks

    def begin(self, present_blocks: int, *, full: bool) -> Turn:
        """A request begins; the owner holds so many blocks and had to evict to hold no more."""
        if full or present_blocks > self._capacity_blocks:
            self._capacity_blocks = present_blocks
        self._shrink()
        self._judge()
        self._number += 1
        turn = Turn(self._number)
        self._turns.append(turn)
        if len(self._turns) > self._most_turns:
            self._turns = deque(turn for turn in self._turns if turn.blocks)
            self._turns.append(turn)
            self._most_turns = 2 * len(self._turns) + _SWEEP_SLACK
        return turn

    def _shrink(self) -> None:
        turns, over = self._turns, self._blocks - self._capacity_blocks
        while turns and turns[0].blocks <= over:
            turn = turns.popleft()
            over -= turn.blocks
            self._blocks -= turn.blocks
            turn.share, turn.queued = 0.0, False
        if over > 0:
            turns[0].share = min(turns[0].share, 1 - over / turns[0].blocks)

    def _judge(self) -> None:
        self._seen_turns += 1
        accesses = self._accesses
        slack = _GIVE_UP_REQUESTS * accesses / self._seen_turns
        deficit = self._deficit = max(self._deficit, -_MOST_LEAD_RATIO * accesses)
        if not self.behind:
            self.behind = deficit > _GIVE_UP_RATIO * accesses + slack
            self._try_again = self._number + self._seen_turns
        elif deficit <= _TRY_AGAIN_RATIO * accesses or self._number >= self._try_again:
            self.behind = False
            self._deficit = min(deficit, 0.0)  # forgiven
        window_blocks = max(_FEWEST_WINDOW_BLOCKS, _WINDOW_CAPACITIES * self._capacity_blocks)
        if accesses > window_blocks and self._seen_turns > _FEWEST_WINDOW_TURNS:
            self._seen_turns //= 2
            self._accesses /= 2
            self._deficit /= 2

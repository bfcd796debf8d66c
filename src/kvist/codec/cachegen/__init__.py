"""`cachegen`: KV that is small on a wire or a disk, at a loss that is chosen and measured.

Theory of operation. A model is profiled once (`kvist codec profile`): what its K and V look like,
channel by channel, and how much the next token's distribution minds an error there. The result is
a *table* (`table.py`). A block is then coded in four steps:

1. Keys are turned back by their position, so that every frequency of RoPE has a mean again; the
   position is found by the encoder (`position.py`) and written down. Values have none.
2. Each head's vector, less its mean, is turned into a basis in which its parts are independent
   and an error in any part costs the model the same (`profile.py`).
3. Every part is rounded to a multiple of one step, which the level sets: levels 1 to 7 double it.
4. Rounded parts are coded by rANS with static tables: each part's spread chooses one of few
   classes of distributions, so the tables stay in the cache and no payload carries one.

Tokens unlike all others (attention sinks, of which there is one or so in a context, and whatever
is not finite) stand in the payload as they are: the model minds their error a thousand times more.

The paper's own structure (groups of ten tokens, 8-bit anchor, deltas to it, bins that widen with
depth) is a family of levels of its own, `cachegen-paper-1` to `-5` (`anchors.py`). Why it is not
the default: measured on SmolLM2-135M the deltas to an anchor have *more* variance than values less
their channel's mean, and an anchor of 8 bits in every ten tokens costs 0.8 bit a value.

Source: Y. Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model
Serving", SIGCOMM 2024, sections 5.1-5.3. What differs: steps 1 and 2 in place of anchors; bins by
measured sensitivity in place of layer thirds; classes of tables in place of one a channel.
"""

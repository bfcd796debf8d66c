"""Blocks between nodes by one-sided reads (NIXL: RDMA where there is any) in place of TCP.

The peers' connection stays what it is: it proves who asks, says who holds what, leases blocks and
carries their checksums. Only the bytes go another way: a *carrier*, a process of its own beside the
node, reads them out of the memory of the other node's carrier.

    reader                                              owner
    CarriedWire ── Lend, Lent, Returned over TCP ──►  Serving         blocks are leased
        │ orders (`words.py`)                            │
    carrier ═════════════ NIXL READ ═══════════════► carrier          maps the arena
        │ into staging
    slot ◄── copied and proven there

Why processes: a read that is under way cannot be called back. NIXL frees the request and says
so (UCX cancels no one-sided read), while bytes may still come; they can also fail by crashing, or
spin. So bytes never land in a slot but in *staging*, out of which they are copied and proven;
staging that is waited for too long is set aside; and what nothing else ends is ended by killing the
carrier, which is certain: then nobody is left who writes. Nothing of it can hurt the node.

A block is right if the copy in its slot has the checksum that came over the proven connection. So
it does no harm if an owner gives a slot to another block while a late reader still reads it: that
reader finds other bytes, and it is a miss.
"""

"""What moves and keeps blocks: connectors, store, tiers, nodes and their cluster."""

from __future__ import annotations

from kvist.metrics.kinds import Kind, Metric

_C, _G = Kind.COUNTER, Kind.GAUGE

BLOCKS: tuple[Metric, ...] = (
    Metric(
        "kvist_blocks_queried_total", _C, "blocks", "Whole blocks of prompts that were looked up."
    ),
    Metric(
        "kvist_blocks_matched_total",
        _C,
        "blocks",
        "Looked-up blocks that were in a tier; over those queried, the hit ratio of blocks.",
    ),
    Metric(
        "kvist_tokens_loaded_total",
        _C,
        "tokens",
        "Tokens whose KV was loaded in place of being computed, by the tier it came from.",
        ("tier",),
    ),
    Metric("kvist_tokens_saved_total", _C, "tokens", "Tokens whose KV was saved."),
    Metric("kvist_blocks_loaded_total", _C, "blocks", "Blocks loaded, by tier.", ("tier",)),
    Metric("kvist_blocks_saved_total", _C, "blocks", "Blocks saved."),
    Metric("kvist_bytes_loaded_total", _C, "bytes", "Bytes of loaded blocks, by tier.", ("tier",)),
    Metric("kvist_bytes_saved_total", _C, "bytes", "Bytes of saved blocks."),
    Metric(
        "kvist_load_seconds_total",
        _C,
        "seconds",
        "Time spent loading, summed over requests, from lease to the last copied page.",
    ),
    Metric(
        "kvist_save_seconds_total",
        _C,
        "seconds",
        "Time spent saving, summed over requests, from reservation to commit.",
    ),
    Metric(
        "kvist_bytes_copied_total",
        _C,
        "bytes",
        "Bytes copied between the engine's pages and DRAM, both ways.",
    ),
    Metric(
        "kvist_copy_seconds_total",
        _C,
        "seconds",
        "Time spent on those copies, summed over copies.",
    ),
    Metric(
        "kvist_misses_total",
        _C,
        "blocks",
        "Blocks that were matched but could not be read or copied (unread, copy), or that another "
        "engine has computed and did not save in time (unsaved).",
        ("cause",),
    ),
    Metric(
        "kvist_fallbacks_total",
        _C,
        "requests",
        "Loads given up for recomputing, by the class of the error.",
        ("error",),
    ),
    Metric(
        "kvist_load_decisions_total",
        _C,
        "requests",
        "Matches by what was decided about them: all, a part or nothing of them loaded, and why.",
        ("reason",),
    ),
    Metric(
        "kvist_loads_cut_off_total",
        _C,
        "requests",
        "Loads that fell behind computing and were cut off; what had arrived was used.",
    ),
    Metric(
        "kvist_saves_skipped_total",
        _C,
        "blocks",
        "Blocks not saved because next to nothing is asked for again.",
    ),
    Metric(
        "kvist_tier_bytes_per_second",
        _G,
        "bytes/s",
        "Bandwidth of reads from a tier as learned; of DRAM, of copies into the engine's pages.",
        ("tier",),
    ),
    Metric(
        "kvist_prefill_error_ratio",
        _G,
        "ratio",
        "Median relative error of the predicted times of the last 64 prefill passes.",
    ),
    Metric("kvist_tier_blocks", _G, "blocks", "Blocks in a tier now.", ("tier",)),
    Metric("kvist_tier_bytes", _G, "bytes", "Bytes a tier uses now.", ("tier",)),
    Metric("kvist_tier_capacity_bytes", _G, "bytes", "Bytes a tier may use.", ("tier",)),
    Metric(
        "kvist_evictions_total", _C, "blocks", "Blocks evicted to make room, by tier.", ("tier",)
    ),
    Metric(
        "kvist_no_space_total",
        _C,
        "requests",
        "Reservations refused because too few slots could be freed at that moment.",
    ),
    Metric(
        "kvist_blend_requests_total",
        _C,
        "requests",
        "Prompts that were to be made of spans, by what became of them: blended; else computed "
        "whole, because that is predicted to be as fast (recompute_faster), blocks could not be "
        "read (unread), the repair found more deviation than allowed (deviates), or it failed "
        "(failed).",
        ("outcome",),
    ),
    Metric(
        "kvist_blended_tokens_total",
        _C,
        "tokens",
        "Tokens whose KV came from a span that was cached elsewhere, repaired ones included.",
    ),
    Metric(
        "kvist_repaired_tokens_total",
        _C,
        "tokens",
        "Of those, tokens that were computed again from the check layer on.",
    ),
    Metric(
        "kvist_breaker_open",
        _G,
        "boolean",
        "1 while a tier's breaker is open and the tier is treated as absent, else 0; on a node of "
        "all that is below DRAM.",
        ("tier",),
    ),
    Metric(
        "kvist_cluster_nodes",
        _G,
        "nodes",
        "Nodes of the cluster as this one knows them: joining, active, draining or suspect.",
        ("state",),
    ),
    Metric("kvist_directory_blocks", _G, "blocks", "Blocks that some node is believed to hold."),
    Metric("kvist_directory_bytes", _G, "bytes", "Memory that the directory's table takes."),
    Metric(
        "kvist_directory_evicted_total",
        _C,
        "blocks",
        "Blocks that the directory forgot because its table was full.",
    ),
    Metric(
        "kvist_directory_corrections_total",
        _C,
        "blocks",
        "Beliefs taken back because the holder said that it has no such block.",
    ),
    Metric("kvist_event_batches_total", _C, "batches", "Batches of KV events that were applied."),
    Metric("kvist_event_gaps_total", _C, "gaps", "Losses in streams of other nodes, asked for."),
    Metric(
        "kvist_event_asks_total", _C, "asks", "Asks for missing batches that were sent to nodes."
    ),
    Metric(
        "kvist_event_restarts_total",
        _C,
        "streams",
        "Streams of events that began anew, after a restart or a loss that nobody could replay: "
        "what was known of that publisher before is void.",
    ),
    Metric(
        "kvist_event_unreadable_total", _C, "messages", "Messages of events that could not be read."
    ),
    Metric(
        "kvist_event_dumps_total",
        _C,
        "dumps",
        "Dumps of everything made for readers whom the replay buffer could not help.",
    ),
    Metric(
        "kvist_replica_offers_total", _C, "blocks", "Blocks offered to other nodes as replicas."
    ),
    Metric(
        "kvist_replica_short_blocks",
        _G,
        "blocks",
        "Blocks of this node with fewer copies than there could be, in the last whole round.",
    ),
    Metric(
        "kvist_replica_fetched_total",
        _C,
        "blocks",
        "Blocks that other nodes offered and this one fetched, or had by then.",
    ),
    Metric(
        "kvist_replica_dropped_total",
        _C,
        "blocks",
        "Blocks that other nodes offered and this one did not fetch: no room, or too late.",
    ),
    Metric(
        "kvist_replica_unsent_total",
        _C,
        "blocks",
        "Offers of blocks that did not reach the other node; they are made again later.",
    ),
    Metric(
        "kvist_discovery_failures_total",
        _C,
        "calls",
        "Looks at discovery that failed; nodes that know each other go on without it.",
    ),
    Metric(
        "kvist_remote_calls_total",
        _C,
        "calls",
        "Calls to the remote, by what was asked: get, put, delete or list.",
        ("operation",),
    ),
    Metric(
        "kvist_remote_failures_total",
        _C,
        "calls",
        "Those that failed, a resting breaker's refusals included.",
        ("operation",),
    ),
    Metric(
        "kvist_remote_seconds_total",
        _C,
        "seconds",
        "Time that calls to the remote took, summed over calls.",
        ("operation",),
    ),
    Metric(
        "kvist_remote_bytes_total",
        _C,
        "bytes",
        "Bytes of objects that came from the remote (get) or went there (put).",
        ("operation",),
    ),
    Metric(
        "kvist_remote_misses_total",
        _C,
        "blocks",
        "Blocks asked of the remote that were no hit: absent, damaged, size, version, codec.",
        ("cause",),
    ),
    Metric(
        "kvist_remote_unsent_total",
        _C,
        "blocks",
        "Blocks that did not get to the remote: refused for the cap on what waits, or failed.",
        ("reason",),
    ),
    Metric(
        "kvist_remote_known_blocks",
        _G,
        "blocks",
        "Blocks that this host believes to be in the remote now.",
    ),
    Metric(
        "kvist_remote_waiting_bytes",
        _G,
        "bytes",
        "Bytes of blocks in memory that wait to be sent to the remote now.",
    ),
    Metric("kvist_peer_blocks_total", _C, "blocks", "Blocks that came from a peer.", ("peer",)),
    Metric("kvist_peer_bytes_total", _C, "bytes", "Bytes of those blocks.", ("peer",)),
    Metric(
        "kvist_peer_absent_total",
        _C,
        "blocks",
        "Blocks asked of a peer that it did not have, or could not bring to its DRAM.",
        ("peer",),
    ),
    Metric(
        "kvist_peer_damaged_total",
        _C,
        "blocks",
        "Blocks that came from a peer with other bytes than it meant to send.",
        ("peer",),
    ),
    Metric(
        "kvist_peer_failures_total",
        _C,
        "calls",
        "Calls to a peer that failed: no answer in time, a broken connection, a refusal, damage.",
        ("peer",),
    ),
    Metric(
        "kvist_peer_resting",
        _G,
        "boolean",
        "1 while a peer keeps failing and is left alone, else 0.",
        ("peer",),
    ),
    Metric(
        "kvist_remote_resting",
        _G,
        "boolean",
        "1 while the remote keeps failing and is left alone, else 0.",
    ),
    Metric("kvist_node_keyspaces", _G, "keyspaces", "Keyspaces that a node has open."),
    Metric("kvist_node_clients", _G, "clients", "Engines that are attached to a node."),
    Metric("kvist_node_uptime_seconds", _G, "seconds", "How long a node has been running."),
    Metric("kvist_node_leases", _G, "leases", "Leases that engines hold at a node."),
    Metric("kvist_node_pinned_blocks", _G, "blocks", "Blocks that are pinned in a node's DRAM."),
    Metric("kvist_node_dirty_blocks", _G, "blocks", "Blocks that a node has yet to write below."),
)

"""A member's figures under the names of `kvist.metrics`; a label's value follows after a dot."""

from __future__ import annotations

from kvist.cluster.member import Member


def measures(member: Member) -> dict[str, float]:
    """What a member counts now."""
    view = member.view
    directory, counts = view.directory, view.directory.counts
    figures: dict[str, float] = {
        "kvist_directory_blocks": len(directory),
        "kvist_directory_bytes": directory.memory_bytes,
        "kvist_directory_evicted_total": directory.evicted,
        "kvist_directory_corrections_total": counts.corrections,
        "kvist_event_batches_total": counts.batches,
        "kvist_event_gaps_total": directory.gaps,
        "kvist_event_asks_total": counts.asks,
        "kvist_event_dumps_total": member.log.dumps,
        "kvist_replica_offers_total": member.replicator.offered_blocks,
    }
    if member.replicator.short is not None:
        figures["kvist_replica_short_blocks"] = member.replicator.short
    for record in view.membership.records():
        suspect = view.membership.is_suspect(record.node)
        name = f"kvist_cluster_nodes.{'suspect' if suspect else record.state.value}"
        figures[name] = figures.get(name, 0) + 1
    return figures

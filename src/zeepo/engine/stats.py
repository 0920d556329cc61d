"""What a session holds and has moved: a snapshot, readable as attributes, as a mapping, and by
people (`print`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from zeepo.chunks.store import ChunkStore, Kind
from zeepo.engine.activations import Activations
from zeepo.engine.assembly import PartsTier
from zeepo.engine.ranks import Ranks
from zeepo.engine.shards import GatherTier
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.pool import BufferPool
from zeepo.units import format_bytes


@dataclass(frozen=True, repr=False)
class Stats(Mapping[str, Any]):
    """A snapshot of a session."""

    bytes_now: dict[str, int]
    """Tier -> bytes held now."""
    bytes_peak: dict[str, int]
    """Tier -> most bytes ever held."""
    bytes_by_tag: dict[str, int]
    """What the bytes in RAM are."""
    bytes_kept: dict[str, int]
    """Kind ("params", "grads", "optimizer state") -> bytes that rest on this rank, in any tier."""
    bytes_moved: dict[str, int]
    """Edge ("disk->ram", "ram->disk") -> bytes since init."""
    evictions: int
    fetches: int
    prefetches: int
    writes: int
    buffer_reuses: int
    seconds_waited: float
    """Time the training thread waited for transfers."""
    activations_spilled: int = 0
    """Saved activations that were sent to disk."""
    activations_fetched: int = 0
    """And brought back."""
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    """With several ranks: kind -> bytes of this rank that others took."""
    bytes_received: Mapping[str, int] = field(default_factory=dict)
    seconds_waited_for_ranks: Mapping[str, float] = field(default_factory=dict)
    """What was waited for, mostly a unit -> seconds."""

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __contains__(self, key: object) -> bool:
        return any(field.name == key for field in fields(self))

    def __str__(self) -> str:
        return stats_text(self)

    __repr__ = __str__


def stats_text(stats: Stats) -> str:
    """A few aligned lines for people; what is zero is left out."""
    rows = [
        ("in RAM", _now_and_peak(stats, "ram")),
        ("of it", _sizes(stats.bytes_by_tag)),
        ("on disk", _now_and_peak(stats, "disk")),
        ("resting", _sizes(stats.bytes_kept)),
        ("moved", _sizes(stats.bytes_moved)),
        ("evictions", f"{stats.evictions}, buffers reused {stats.buffer_reuses}"),
        ("reads", f"{stats.fetches}, {stats.prefetches} of them ahead; writes {stats.writes}"),
        ("activations", _activations(stats)),
        ("waited", f"{stats.seconds_waited:.2f} s for transfers"),
        ("sent", _sizes(stats.bytes_sent)),
        ("received", _sizes(stats.bytes_received)),
        ("for ranks", _waited_for_ranks(stats.seconds_waited_for_ranks)),
    ]
    shown = [(title, text) for title, text in rows if text]
    width = max(len(title) for title, _ in shown)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in shown)


def _now_and_peak(stats: Stats, tier: str) -> str:
    now, peak = stats.bytes_now.get(tier, 0), stats.bytes_peak.get(tier, 0)
    return f"{format_bytes(now)}, at most {format_bytes(peak)}" if peak else ""


def _sizes(by_name: Mapping[str, int]) -> str:
    """The largest first."""
    ordered = sorted(by_name.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in ordered if nbytes)


def _activations(stats: Stats) -> str:
    spilled, fetched = stats.activations_spilled, stats.activations_fetched
    return f"{spilled} to disk, {fetched} back" if spilled else ""


def _waited_for_ranks(seconds: Mapping[str, float]) -> str:
    """In all, and what was waited for longest."""
    if not seconds:
        return ""
    longest = max(seconds, key=seconds.__getitem__)
    return f"waited {sum(seconds.values()):.2f} s, longest for {longest}: {seconds[longest]:.2f} s"


def collect_stats(
    store: ChunkStore,
    pool: BufferPool,
    disk: DiskTier | None,
    activations: Activations | None = None,
    ranks: Ranks | None = None,
) -> Stats:
    """The snapshot of this moment."""
    counters = store.counters
    ledger = pool.ledger
    return Stats(
        bytes_now={"ram": ledger.used_bytes, "disk": disk.used_bytes if disk else 0},
        bytes_peak={"ram": ledger.peak_bytes, "disk": disk.peak_bytes if disk else 0},
        bytes_by_tag=ledger.by_tag(),
        bytes_kept=_bytes_kept(store),
        bytes_moved={
            "disk->ram": disk.bytes_read if disk else 0,
            "ram->disk": disk.bytes_written if disk else 0,
        },
        evictions=counters.num_evictions,
        fetches=counters.num_fetches,
        prefetches=counters.num_prefetches,
        writes=counters.num_writes,
        buffer_reuses=pool.num_reuses,
        seconds_waited=counters.seconds_waited,
        activations_spilled=activations.num_spilled if activations else 0,
        activations_fetched=activations.num_fetched if activations else 0,
        bytes_sent=dict(ranks.network.counters.bytes_sent) if ranks else {},
        bytes_received=dict(ranks.network.counters.bytes_received) if ranks else {},
        seconds_waited_for_ranks=dict(ranks.network.counters.seconds_waited) if ranks else {},
    )


def _bytes_kept(store: ChunkStore) -> dict[str, int]:
    """Not counted: wholes that were put together from parts, contributions, and buffers."""
    kept = {kind.value: 0 for kind in Kind}
    for chunk in store.chunks():
        is_put_together = chunk.is_copy or isinstance(chunk.home, (GatherTier, PartsTier))
        if not is_put_together and chunk.is_foreseeable:
            kept[chunk.kind.value] += sum(
                chunk.layout.slots[index].nbytes for index, _ in chunk.present()
            )
    return kept

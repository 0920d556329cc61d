"""What a rank that was killed leaves on the disk: the ranks of its host remove it.

Every rank tells where its scratch folders are. When its connection breaks, those that are left try
for a moment to get the folder's lock, which they only do when its owner is really dead
([memory/scratch]); one of them removes it. Folders of other sessions are left alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from zeepo.engine.sharded import Subject
from zeepo.launch import launching
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.scratch import remove_before_hard_end, remove_of_dead
from zeepo.sharding.neighbour import host_name
from zeepo.sharding.network import Network

LOCK_SECONDS = 1.0
"""How long a process that dies may take to let go of its files."""
NUMBER = 2
"""Of the exchange, among those at the start."""


def exchange_legacies(network: Network, disk: DiskTier | None) -> None:
    """Tell where our scratch folders are, and look after those of ranks that die."""
    folders = [] if disk is None else [str(d.folder.path.resolve()) for d in disk.directories]
    mine = json.dumps([host_name().decode(), folders]).encode()
    told = [json.loads(fact) for fact in network.collect(Subject.START, NUMBER, mine, "the start")]
    here = told[network.rank][0]

    def remove(rank: int) -> None:
        host, its_folders = told[rank]
        for folder in its_folders if host == here else ():
            remove_of_dead(Path(folder), LOCK_SECONDS)

    network.on_dead = remove
    launching.before_hard_end = remove_before_hard_end

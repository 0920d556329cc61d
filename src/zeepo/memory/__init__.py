"""WHERE bytes live: the ledger of a budget, reusable buffers, and the tiers below them.

Read in this order: `ledger` (who holds how many bytes) > `mapping`, `pool` (the buffers
themselves) > `tier` (what a tier promises) > `transfers` (ordering and threads) > `ram_tier`;
`striping` and `space` (pure: which byte goes where) > `files`, `scratch` (the operating system) >
`disk_tier`. Nothing here knows what a parameter or a chunk is.
"""

"""Is training under zeepo bit for bit what plain PyTorch does? Recording, comparing, reporting.

`values` reduces what a run shows to bytes and says how two of them differ; `record` compares whole
runs (the parity tests use it). The command `zeepo verify` adds processes: `stage` forks one per
run, `child` runs the user's program in it, `watch` observes it; `runs`, `lockstep` and `bisect`
are the command's side.
"""

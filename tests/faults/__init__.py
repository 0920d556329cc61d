"""Bad input, full disks, interrupts, leaks: what must never end in a wrong number or a crash."""

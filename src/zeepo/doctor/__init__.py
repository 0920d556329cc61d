"""Looking at a machine: what it has, what of zeepo works on it, what is slow. See cli/doctor.py."""

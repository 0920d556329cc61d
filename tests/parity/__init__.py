"""Parity suite: users' programs run plainly and under zeepo, compared bit for bit."""

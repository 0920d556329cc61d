"""Whose bytes they are: ranges per rank, and the network over which ranks ask each other."""

"""Tests of the weights in files."""

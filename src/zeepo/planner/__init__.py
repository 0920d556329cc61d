"""Deciding: units, working sets, budgets."""

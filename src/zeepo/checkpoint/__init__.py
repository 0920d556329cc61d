"""KEEP: a model's weights in files that other programs read, written and read inside the budget."""

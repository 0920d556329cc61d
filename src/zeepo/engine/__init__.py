"""The engine: what happens in one training step."""

"""The session as the user meets it."""

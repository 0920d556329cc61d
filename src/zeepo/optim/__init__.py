"""Running the user's own optimizer on slots."""

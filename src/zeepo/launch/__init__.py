"""Starting the other ranks from the first one, and giving each its slice of the data."""

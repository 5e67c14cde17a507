"""Studies: specifications, their runs, and the results on disk."""

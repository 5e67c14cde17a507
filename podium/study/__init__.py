"""Studies: designed sets of runs, their results on disk, what the results allow to be said, and the report."""

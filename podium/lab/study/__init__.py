"""Studies: what is asked, which runs that takes, and their results on disk."""

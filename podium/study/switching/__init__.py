"""When to leave all-reduce."""

"""Studies that were published, each with its own design, tables and page."""

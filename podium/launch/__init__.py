"""Starting a run: launchers, the processes of a run, the coordinator, the members."""

"""Runs across hosts that share nothing: an agent per host, started by ssh, SLURM or Ray, starts the ranks there."""

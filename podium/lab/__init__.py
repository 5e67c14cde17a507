"""The laboratory: studies, their statistics and reports, and benchmarks of Podium against its peers."""

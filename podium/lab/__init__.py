"""The laboratory: studies, their statistics and reports, and Podium beside its peers."""

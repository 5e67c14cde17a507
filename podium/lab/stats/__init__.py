"""What may be concluded from results: intervals, tests, analysis of variance, power."""

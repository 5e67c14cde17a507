"""What results allow to be said: intervals, tests, analysis of variance, power."""

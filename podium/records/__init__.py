"""What a run records, and what is computed from that: summary, audit, timeline, trace, energy."""

"""What a run writes down, and what is worked out from that: summary, audit, timeline, trace, energy."""

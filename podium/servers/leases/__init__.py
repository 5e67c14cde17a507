"""Which samples a worker trains on next: the cursor over the global order, leases, and workers that are late."""

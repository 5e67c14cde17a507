"""How trials share a device."""

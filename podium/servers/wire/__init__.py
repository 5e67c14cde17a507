"""Messages between workers and servers: a type per message, states in parcels, packed pushes."""

"""A worker's side of servers: seed them, push gradients and pull parameters, collect the state at the end."""

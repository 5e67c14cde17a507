"""What a worker does with its servers: seed them, push gradients and pull parameters, collect its state at the end."""

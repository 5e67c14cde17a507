"""One rank: its replica, flat buffers, gradients, optimizer, batches, the training loop, checkpoints, recovery."""

"""From a bucket to the network: how tensors are packed (codecs) and summed (collectives)."""

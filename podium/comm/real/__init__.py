"""The real world: processes, sockets, shared memory, `torch.distributed`."""

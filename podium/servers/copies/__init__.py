"""Copies of servers: replicas on neighbours, snapshots on disk, and how a lost server is restored from them."""

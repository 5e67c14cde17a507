"""What survives a lost server: replicas on its neighbours, snapshots on disk, and how a new server takes its place."""

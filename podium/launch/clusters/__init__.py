"""Clusters as files, and their nodes as network namespaces of this machine."""

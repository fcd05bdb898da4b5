"""Clusters as data: GPUs, nodes, NICs, switches and levels, read from conf/cluster/ or from a fabric's own files. No torch."""

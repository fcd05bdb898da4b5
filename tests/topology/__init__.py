"""Tests of clusters as data and of the readers of fabrics."""

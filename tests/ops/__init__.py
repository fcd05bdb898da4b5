"""Tests of lightning_megascale.ops."""

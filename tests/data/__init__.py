"""Tests of lightning_megascale.data."""

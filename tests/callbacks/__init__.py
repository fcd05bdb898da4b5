"""Tests of lightning_megascale.callbacks."""

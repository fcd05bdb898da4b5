"""Tests of lightning_megascale.parallel."""

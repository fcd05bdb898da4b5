"""Tests of lightning_megascale.strategies."""

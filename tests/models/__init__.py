"""Tests of lightning_megascale.models."""

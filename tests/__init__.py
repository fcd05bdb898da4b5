"""Tests: they mirror the package; harness.py starts ranks on one machine."""

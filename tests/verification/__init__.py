"""Tests of verification/: the proof on models of a user's own, right ones and wrong ones."""

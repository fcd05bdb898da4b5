"""Measurements, which no test tier collects."""

"""Measurements: `bench.py` takes them, `report.py` shows them."""

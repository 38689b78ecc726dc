"""Benchmarks of this repository; not installed. ``python -m benchmarks.run`` from the checkout."""

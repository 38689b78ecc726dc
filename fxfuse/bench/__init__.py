"""Targets, timer, measurement, predictions and tables behind ``fxfuse bench``, ``profile`` and ``explain``."""

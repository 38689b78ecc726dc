"""Targets, timer, measurement and tables behind ``fxfuse bench`` and ``fxfuse explain``."""

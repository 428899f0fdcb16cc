"""Runs schedules: simulator, rewrite of graphs, applying to modules, measuring."""

from runtime.measure import Measurement, measure

__all__ = ["Measurement", "measure"]

"""Measuring a pair: acceptance, speed, losslessness."""

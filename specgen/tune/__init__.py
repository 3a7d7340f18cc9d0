"""Measured costs and observed acceptance → the fastest setting. Pure: no model, no torch, no clock."""

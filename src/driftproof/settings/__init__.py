"""Definitions of all settings: name, type, default, bounds and effect of each. Imports no torch."""

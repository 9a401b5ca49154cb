"""Definitions of all settings: name, type, default, bounds and effect of each, in one place. Without torch."""

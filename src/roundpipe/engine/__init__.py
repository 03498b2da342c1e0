"""Runs a schedule on devices."""

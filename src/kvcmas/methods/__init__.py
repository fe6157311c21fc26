"""Sharing methods, one file each, and their registry: they turn a prompt into a plan."""

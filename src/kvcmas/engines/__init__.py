"""Engines execute plans on a model; each lives in its own subpackage."""

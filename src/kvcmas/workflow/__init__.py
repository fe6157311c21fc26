"""Agents, workflows, plans and segment matching. No torch."""

"""Segment KV, RoPE moves, low-rank factors, streaming moments and maps. Torch only."""

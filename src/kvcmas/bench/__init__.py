"""Benchmarks: fidelity, accuracy, latency, memory. A client of the public API."""

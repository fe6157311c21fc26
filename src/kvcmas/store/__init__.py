"""Where KV and correction states live: keys, pools with byte budgets, files on disk."""

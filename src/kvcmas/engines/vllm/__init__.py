"""kvcmas in vLLM: a KV connector and a scheduler class, given through vLLM's own options.

    scheduler's process                            each worker's process
    connector.py     vLLM's door, in both          connector.py
    scheduler.py     vLLM's scheduler, with holes  worker.py      loads, measures, captures
    coordinator.py   requests, step by step        pool.py        KV of all donors, in two tiers
    progress.py      how far a plan is executed    kv_access.py   the paged cache, by position
    directory.py     donors: names and tokens      lessons.py     learning, in a thread
    mirror.py        what the workers learned      books.py       what was learned
                            --- messages.py: StepWork --->
                            <--- messages.py: Report ---

What users see: options.py, hints.py, records.py, metrics.py. What of vLLM is private: compat.py.
`docs/index.md` follows one request. Importing this package does not import vLLM.
"""

"""kvcmas in vLLM: a KV connector and a scheduler class, given through vLLM's own options.

    scheduler process                                 worker process (one for each rank)
    scheduler.py    which tokens a step computes      worker.py     loads, measures, captures
    tracking.py     requests from arrival to end      lessons.py    learning, in a thread
    directory.py    names and tokens of all donors    pool.py       KV of all donors
                          --- messages.py: StepWork --->
                          <--- messages.py: Report ---

Importing this package does not import vLLM; its modules do.
"""

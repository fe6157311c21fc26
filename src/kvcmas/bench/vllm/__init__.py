"""What kvcmas in vLLM is worth: exactness, quality, speed and safety, measured on real engines.

    run.py      all parts, each in a process of its own (child.py), and the figures (figures.py)
    holes.py    prompts with holes of their own true KV, against prompts without
    plain.py    requests that reuse nothing, against vLLM without kvcmas (plain_reference.py)
    quality.py  the same plans and corrections in vLLM and in the transformers engine
    serving.py  `kvcmas serve` beside vLLM's own server: TTFT, overhead (latencies.py), and an
                unchanged client (chat.py) on text after text (chats.py)
    soak.py     many random requests of several tenants

Importing a part loads neither vLLM nor torch's engines; running it does.
"""

"""The table of TTFT and memory, on a tiny model."""

from __future__ import annotations

import json

import torch

from kvcmas.bench.gpu import GpuBench, GpuSettings, gpu_record, one_billion_config


def test_all_methods_at_all_lengths(device: torch.device) -> None:
    settings = GpuSettings(lengths=(300, 600), learn=2, learn_length=300, repeats=1, tiny=True)
    rows = GpuBench(settings, device).run()
    assert [(row.context, row.method) for row in rows] == [
        (length, method)
        for length in (300, 600)
        for method in ("nonshared", "fullshared", "kvcmas")
    ]
    for row in rows:
        assert row.computed + row.reused == row.context + 80
        assert (row.peak_mib is None) == (device.type == "cpu")
    by_method = {row.method: row for row in rows if row.context == 600}
    assert by_method["nonshared"].ttft_ratio == 1
    assert by_method["nonshared"].computed == 600 + 20
    assert by_method["fullshared"].computed <= 20 + 8
    assert 0.05 * 600 < by_method["kvcmas"].computed < 0.2 * 600
    assert json.loads(json.dumps(gpu_record(settings, rows, "none")))["rows"][0]["context"] == 300


def test_shapes_of_llama_1b() -> None:
    config = one_billion_config()
    hidden, layers, wide = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * wide + 2 * hidden
    total = config.vocab_size * hidden + layers * layer + hidden
    assert total == 1_235_814_400

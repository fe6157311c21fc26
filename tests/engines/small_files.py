"""Small models as files: a chat tokenizer, a folder as `save_pretrained` writes it, a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END, BEGIN = "<|im_start|>", "<|im_end|>", "<s>"
SPECIAL = (BEGIN, START, END)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = [*SPECIAL, *ALPHABET, "he", "ll", "hell"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll")]
IDS = {text: index for index, text in enumerate(VOCAB)}

KV_HEADS = 2

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with three merges, three control tokens, and `<s>` before plain texts."""
    backend = Tokenizer(models.BPE(vocab=IDS, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, IDS[BEGIN])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def small_config() -> LlamaConfig:
    """Two layers, two KV heads of 8."""
    return LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        bos_token_id=IDS[BEGIN],
        eos_token_id=IDS[END],
        tie_word_embeddings=False,
    )


def small_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights, the same for each seed."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(small_config())
    model.eval()
    return model


def save_folder(folder: Path) -> Path:
    """A model folder with tokenizer."""
    small_model().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def save_gguf(file: Path, architecture: str = "llama", left_out: str = "") -> Path:
    """The same shapes as a GGUF file with float32 weights, without the tensor `left_out`."""
    config = small_config()
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(IDS[BEGIN])
    writer.add_eos_token_id(IDS[END])
    writer.add_chat_template(TEMPLATE)
    for name, shape in _gguf_shapes(config).items():
        if name == left_out:
            continue
        values = np.random.default_rng(len(name)).normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    keys = KV_HEADS * 8
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(VOCAB), hidden),
        "output.weight": (len(VOCAB), hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_q.weight": (hidden, hidden),
            f"{block}.attn_k.weight": (keys, hidden),
            f"{block}.attn_v.weight": (keys, hidden),
            f"{block}.attn_output.weight": (hidden, hidden),
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.ffn_norm.weight": (hidden,),
            f"{block}.ffn_gate.weight": (wide, hidden),
            f"{block}.ffn_up.weight": (wide, hidden),
            f"{block}.ffn_down.weight": (hidden, wide),
        }
    return shapes

"""Families of transformers that read and write text, tiny and with random weights, on batches of many lengths."""

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from compile_sweep import WorkloadFromModel

WORDS = 128
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
make = partial(WorkloadFromModel, num_batches=5)


def rows() -> Tensor:
    return torch.randint(5, WORDS, (4, int(torch.randint(12, 25, ()))))


def padded_rows() -> tuple[Tensor, Tensor]:
    ids = rows()
    lengths = torch.randint(ids.size(1) // 2, ids.size(1) + 1, (4, 1))
    mask = (torch.arange(ids.size(1)) < lengths).long()
    mask[0] = 1
    return ids * mask, mask


def masked_words(number: int) -> dict[str, Tensor]:
    ids, mask = padded_rows()
    labels = torch.where((torch.rand(ids.shape) < 0.3) & mask.bool(), ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def next_words(number: int) -> dict[str, Tensor]:
    ids = rows()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def classes(number: int) -> dict[str, Tensor]:
    ids, mask = padded_rows()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (4,))}


def tagged_words(number: int) -> dict[str, Tensor]:
    ids, mask = padded_rows()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids % 2, -100)}


def answers(number: int) -> dict[str, Tensor]:
    ids, mask = padded_rows()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "start_positions": torch.arange(4) % 3,
        "end_positions": torch.arange(4) % 3 + 1,
    }


def translations(number: int) -> dict[str, Tensor]:
    ids, mask = padded_rows()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(5, WORDS, (4, int(torch.randint(6, 13, ()))))}


Albert = make(lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(embedding_size=16, **SIZES)), masked_words)
Bart = make(
    lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=WORDS,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=64,
        )
    ),
    translations,
)
Bert = make(lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)), masked_words)
BertForAnswers = make(lambda: hf.BertForQuestionAnswering(hf.BertConfig(**SIZES)), answers, lengths="real")
BertForTags = make(lambda: hf.BertForTokenClassification(hf.BertConfig(**SIZES)), tagged_words)
Bloom = make(lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)), next_words)
Deberta = make(
    lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16, **SIZES)
    ),
    classes,
)
DistilBert = make(
    lambda: hf.DistilBertForMaskedLM(
        hf.DistilBertConfig(vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64)
    ),
    masked_words,
)
Electra = make(lambda: hf.ElectraForPreTraining(hf.ElectraConfig(embedding_size=16, **SIZES)), tagged_words)
Falcon = make(
    lambda: hf.FalconForCausalLM(hf.FalconConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
    next_words,
)
Gemma = make(lambda: hf.GemmaForCausalLM(hf.GemmaConfig(num_key_value_heads=2, head_dim=8, **SIZES)), next_words)
Gpt2 = make(
    lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64)), next_words
)
GptNeoX = make(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)), next_words)
Llama = make(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SIZES)), next_words)
Mamba = make(
    lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4)),
    lambda number: {"input_ids": (ids := rows()[:, :8]), "labels": ids.clone()},
)
Mistral = make(lambda: hf.MistralForCausalLM(hf.MistralConfig(num_key_value_heads=2, sliding_window=8, **SIZES)), next_words)
Mixtral = make(
    lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **SIZES)
    ),
    next_words,
)
Opt = make(
    lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        )
    ),
    next_words,
)
Phi = make(lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES)), next_words)
Qwen2 = make(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(num_key_value_heads=2, **SIZES)), next_words)
Qwen3 = make(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(num_key_value_heads=2, head_dim=8, **SIZES)), next_words)
Roberta = make(lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZES)), classes)
T5 = make(
    lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    translations,
)

"""Models of transformers have the same loss and gradients for texts that are padded further, and the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from compile_sweep.script.apply.padding import Padder, change_of_outputs, why_not_padded
from compile_sweep.script.discover import Target

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
OF_BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
OF_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
TEXT = {**SMALL, "max_position_embeddings": 40, "bos_token_id": 0, "eos_token_id": 2}
PICTURES = {**{name: SMALL[name] for name in list(SMALL)[:4]}, "image_size": 16, "patch_size": 8}

LENGTH, WRITTEN = 21, 9
MASK = (torch.arange(LENGTH) < torch.tensor([LENGTH, 13, 17, 5])[:, None]).long()

MODELS: dict[str, Any] = {
    "RobertaForMaskedLM": tf.RobertaConfig(**SMALL, max_position_embeddings=66),  # positions start behind its padding token
    "BertForSequenceClassification": tf.BertConfig(**SMALL, num_labels=3),
    "BertForTokenClassification": tf.BertConfig(**SMALL, num_labels=3),
    "DebertaV2ForMaskedLM": tf.DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16
    ),
    "ElectraForPreTraining": tf.ElectraConfig(**SMALL, embedding_size=16),  # one number for each token
    "GPT2LMHeadModel": tf.GPT2Config(**OF_GPT2),
    "GPT2ForSequenceClassification": tf.GPT2Config(**OF_GPT2, pad_token_id=0, num_labels=3),
    "LlamaForCausalLM": tf.LlamaConfig(**SMALL),
    "MixtralForCausalLM": tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True),
    "BartForConditionalGeneration": tf.BartConfig(**OF_BART, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64),
    "T5ForConditionalGeneration": tf.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    ),
    "CLIPModel": tf.CLIPConfig(text_config=TEXT, vision_config=PICTURES, projection_dim=8),
    "WhisperForConditionalGeneration": tf.WhisperConfig(
        **OF_BART, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20, vocab_size=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    ),
    "VisionEncoderDecoderModel": tf.VisionEncoderDecoderConfig(
        encoder=tf.ViTConfig(**PICTURES).to_dict(),
        decoder=tf.TrOCRConfig(
            d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32, vocab_size=64,
            cross_attention_hidden_size=16,
        ).to_dict(),
        pad_token_id=0,
        decoder_start_token_id=2,
    ),
}  # fmt: skip
WRITES_ALONE = {
    "WhisperForConditionalGeneration": ("input_features", (4, 80, 40)),
    "VisionEncoderDecoderModel": ("pixel_values", (4, 3, 16, 16)),
}
"""Models that read no text, with what they read."""


def batch_for(name: str, config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(columns: int, least: int = 3, most: int = 60) -> torch.Tensor:
        return torch.randint(least, most, (4, columns), generator=generator)

    labels = drawn(WRITTEN)
    labels[2, 5:] = -100
    if name in WRITES_ALONE:
        read, shape = WRITES_ALONE[name]
        return {read: torch.randn(shape, generator=generator), "labels": labels}
    padding = config.pad_token_id if isinstance(getattr(config, "pad_token_id", None), int) else 0
    ids = drawn(LENGTH).masked_fill(MASK == 0, padding)
    batch = {"input_ids": ids, "attention_mask": MASK}
    if name == "CLIPModel":
        return {**batch, "pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "return_loss": torch.tensor(True)}
    if "SequenceClassification" in name:
        labels = torch.tensor([0, 1, 2, 0])
    elif "PreTraining" in name:
        labels = drawn(LENGTH, 0, 2)
    elif "ConditionalGeneration" not in name:
        labels = (drawn(LENGTH, 0, 3) if "Token" in name else ids).masked_fill(MASK == 0, -100)
    return {**batch, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_for_texts_that_are_padded_further(name: str) -> None:
    torch.manual_seed(1)
    model = getattr(tf, name)(MODELS[name]).eval()
    batch = batch_for(name, MODELS[name])

    def found(call: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        model.zero_grad()
        outputs = call(**batch)
        outputs.loss.backward()
        return outputs, {part: weights.grad for part, weights in model.named_parameters() if weights.grad is not None}

    plain, gradients = found(model)
    outputs, padded = found(Padder(model, 16).around(model.__call__, applies=lambda: True))
    torch.testing.assert_close(outputs.loss, plain.loss, rtol=1e-5, atol=0.0)
    for part, gradient in gradients.items():
        torch.testing.assert_close(padded[part], gradient, rtol=1e-4, atol=1e-6)
    assert change_of_outputs(model, (), batch) < 1e-4
    for part, output in plain.items():
        if isinstance(output, torch.Tensor):
            assert outputs[part].shape == output.shape, part


@pytest.mark.parametrize("name", WRITES_ALONE)
def test_a_text_that_is_only_written_is_padded_up_to_the_decoders_positions(name: str) -> None:
    model = getattr(tf, name)(MODELS[name])
    read, shape = WRITES_ALONE[name]
    shapes: list[dict[str, tuple[int, ...]]] = [{read: shape, "labels": (4, columns)} for columns in (9, 12)]
    assert why_not_padded(Target(called=model, module=model, name="model", shapes=shapes)) is None
    labels = batch_for(name, MODELS[name])["labels"]
    assert (labels == -100).any()
    pads = Padder(model, 10_000)
    most = MODELS[name].max_target_positions if "Whisper" in name else model.config.decoder.max_position_embeddings
    assert pads.without_values((), {"labels": labels})[1]["labels"].shape == (4, most)
    no_decoder = tf.BertForTokenClassification(tf.BertConfig(**SMALL))
    refused = why_not_padded(Target(called=no_decoder, module=no_decoder, name="model", shapes=shapes))
    assert refused is not None
    assert "not called with any" in refused


def test_a_model_that_looks_for_answers_among_all_tokens_is_not_padded() -> None:
    torch.manual_seed(1)
    model = tf.BertForQuestionAnswering(tf.BertConfig(**SMALL)).eval()
    batch = {"input_ids": torch.randint(3, 60, (4, LENGTH)), "attention_mask": MASK}
    batch |= {"start_positions": torch.tensor([1, 2, 3, 0]), "end_positions": torch.tensor([3, 4, 5, 1])}
    call = Padder(model, 16).around(model.__call__, applies=lambda: True)
    torch.testing.assert_close(call(**batch).loss, model(**batch).loss, rtol=1e-6, atol=0.0)
    without = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(call(**without).start_logits, model(**without).start_logits, rtol=1e-5, atol=1e-6)

"""Families of transformers that see and hear, tiny and with random weights."""

from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from compile_sweep import WorkloadFromModel

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
make = partial(WorkloadFromModel, num_batches=5)


def pictures(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(2, (4,))}


def scenes(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(5, (2, 64, 64))}


def boxes(number: int) -> dict[str, Any]:
    objects = [{"class_labels": torch.randint(5, (3,)), "boxes": torch.rand(3, 4) * 0.3 + 0.3} for _ in range(2)]
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": objects}


def captions(number: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 128, (4, int(torch.randint(12, 25, ()))))
    ids[:, -1] = 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(4, 3, 32, 32)}


def both_towers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def speech(number: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(4, 8, 32), "labels": torch.randint(5, 128, (4, int(torch.randint(6, 13, ()))))}


def sound(number: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(4, int(torch.randint(800, 1200, ()))), "labels": torch.randint(1, 32, (4, 5))}


def detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    return hf.DetrForObjectDetection(hf.DetrConfig(backbone_config=backbone, num_labels=5, num_queries=6, **SPEECH))


def clip() -> nn.Module:
    text = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return hf.CLIPModel(hf.CLIPConfig(text_config={**text, "eos_token_id": 2}, vision_config=SIZES, projection_dim=16))


Beit = make(lambda: hf.BeitForImageClassification(hf.BeitConfig(drop_path_rate=0.1, **SIZES)), pictures)
Clip = make(clip, captions, both_towers)
ConvNext = make(
    lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.1)
    ),
    pictures,
)
Deit = make(lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SIZES)), pictures)
Detr = make(detr, boxes)
Dinov2 = make(
    lambda: hf.Dinov2ForImageClassification(
        hf.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
    ),
    pictures,
)
MobileNetV2 = make(lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(depth_multiplier=0.25)), pictures)
RegNet = make(
    lambda: hf.RegNetForImageClassification(
        hf.RegNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], groups_width=8)
    ),
    pictures,
)
ResNet = make(
    lambda: hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2])), pictures
)
Segformer = make(
    lambda: hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(
            num_labels=5,
            num_encoder_blocks=2,
            depths=[2, 2],
            sr_ratios=[4, 2],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        )
    ),
    scenes,
)
Swin = make(
    lambda: hf.SwinForImageClassification(
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    ),
    pictures,
)
Vit = make(lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZES)), pictures)
VitMae = make(
    lambda: hf.ViTMAEForPreTraining(
        hf.ViTMAEConfig(
            decoder_hidden_size=32,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=64,
            **SIZES,
        )
    ),
    lambda number: {"pixel_values": torch.randn(4, 3, 32, 32)},
)
Wav2Vec2 = make(
    lambda: hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            mask_time_length=2,
            ctc_loss_reduction="mean",
            ctc_zero_infinity=True,
        )
    ),
    sound,
    lengths="real",
)
Whisper = make(
    lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=128,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            **SPEECH,
        )
    ),
    speech,
)

"""Image captioning: a ViT encoder and a GPT-2 decoder with cross-attention, on synthetic data."""

from workloads.captioning.workload import Captioning

__all__ = ["Captioning"]

"""The model: MoonViT tower, projector, DeepSeek-V3-style decoder; explicit tensor code without collectives."""

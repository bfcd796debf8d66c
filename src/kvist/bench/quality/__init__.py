"""What a codec, or KV that was blended, does to a model's answers, measured on the model."""

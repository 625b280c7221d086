"""Hugging Face folders: config, tensors, tokenizer and chat template."""

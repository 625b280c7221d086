"""Folders in the layout of Hugging Face: config, tensors, tokenizer and chat template."""

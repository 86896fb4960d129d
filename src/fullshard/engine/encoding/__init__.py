"""Encodings in which ranks send numbers instead of full precision: pure functions of tensors."""

"""What ranks send in place of full precision: pure functions of tensors."""

"""What users do with gradients: clipping, scaling, communication hooks."""

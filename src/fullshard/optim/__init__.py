"""Optimizers over whole tensors, of a model whose parameters are sharded."""

from .optimizer import WholeOptimizer, whole

__all__ = ["WholeOptimizer", "whole"]

"""Gradient scaling in training loops of other libraries: Accelerate and transformers' Trainer, Lightning."""

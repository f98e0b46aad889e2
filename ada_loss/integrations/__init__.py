"""Gradient scaling in the training loops of Accelerate, transformers' Trainer and Lightning."""

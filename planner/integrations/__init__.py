"""Callbacks for trainers: plan on the first batch, log the plan, take it away after training.

Each needs its trainer installed: `hf` transformers, `accelerate` accelerate, `lightning` lightning.
"""

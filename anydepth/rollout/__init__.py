"""Rollouts for reinforcement learning: groups of answers, replay of their probabilities, adapters for trainers."""

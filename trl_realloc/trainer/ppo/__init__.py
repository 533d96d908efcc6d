"""PPO's side of a run: its setup, models, prompts, evaluation and TRL's attributes."""

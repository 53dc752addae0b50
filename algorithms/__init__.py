"""Published advantages and losses beyond those in train_grpo.py."""

"""A Trainer for scripts written for Hugging Face."""

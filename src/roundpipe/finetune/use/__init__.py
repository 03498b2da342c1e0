"""What is done with a result: opening it, merging, chatting, evaluating."""

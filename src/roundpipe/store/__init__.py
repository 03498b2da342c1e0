"""Where a layer's tensors live on the host between steps."""

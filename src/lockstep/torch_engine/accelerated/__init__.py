"""What is done differently if the policy is on an accelerator, so that the host rarely waits for it."""

"""What is done otherwise where the policy is on an accelerator, so that it is waited for as seldom as can be."""

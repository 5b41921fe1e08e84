"""Speed: what Lockstep is measured with. Run from the repository's root."""

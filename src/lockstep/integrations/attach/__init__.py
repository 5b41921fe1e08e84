"""`lockstep.attach`: data parallelism for any PyTorch loop."""

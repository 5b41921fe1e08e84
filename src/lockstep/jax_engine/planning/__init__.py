"""What only `lockstep plan` asks of this engine: what an iteration computes, moves and holds."""

"""What a run does before it trains: it tries a user's own loss, and says how it is set up."""

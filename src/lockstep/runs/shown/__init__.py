"""How numbers and names are shown to people, in words and in pictures."""

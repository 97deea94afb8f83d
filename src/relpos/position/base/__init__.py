"""What mechanisms are made of: their base classes, what a model tells them, and their names."""

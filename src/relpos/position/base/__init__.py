"""What mechanisms are made of: their base classes, their place in a model, and their names."""
